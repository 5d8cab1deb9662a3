"""What the layers of a model ask of attention beside softmax: held to the config, put into words.

Model code says it in the call (windows, caps, sinks), the config says it in a file; where the two
differ, one of them is not what it looks like: a window that only a mask would have told, say. Owns
that comparison and the sentences for the start-up log. Knows neither steps nor tensors' values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvist.errors import ModelError
from kvist.kernels.dispatch import KernelSet
from kvist.kernels.options import AttentionOptions
from kvist.spec import KVSpec


def layer_windows(spec: KVSpec) -> tuple[int | None, ...]:
    """Window of each layer by the config, in tokens; None where it sees everything."""
    windows = {layer: group.window for group in spec.groups for layer in group.layers}
    return tuple(windows.get(layer) for layer in range(spec.num_layers))


def check_asked(
    name: str,
    asked: Mapping[int, AttentionOptions],
    windows: Sequence[int | None],
    softcap: float | None,
    max_model_len: int,
) -> None:
    """Refuse a model whose code asks for something else than its config says.

    Parameters
    ----------
    name : str
        Of the model's class.
    asked : mapping of int to AttentionOptions
        By layer; windows that cut nothing are left out.
    windows : sequence of int or None
        [L], by the config.
    softcap : float or None
        By the config.
    max_model_len : int
        A window at least as long cuts nothing.

    Raises
    ------
    ModelError
        Names the first layer that differs, and both numbers.
    """
    for layer, window in enumerate(windows):
        options = asked[layer]
        cuts = window if window is not None and window < max_model_len else None
        if options.window != cuts:
            least = min(w for w in (options.window, cuts) if w is not None)
            raise ModelError(
                f"{name}: its config gives layer {layer} {_window(cuts)}, its code asks attention"
                f" for {_window(options.window)}; one of them is lost on the way, so longer texts"
                f" would come out wrong. --max-model-len {least} makes both full attention"
            )
        if options.softcap != (softcap or None):
            raise ModelError(
                f"{name}: its config caps attention scores at {softcap}, its code asks layer"
                f" {layer} for {options.softcap}; serving it would give wrong text"
            )


def describe_asked(
    asked: Mapping[int, AttentionOptions], kernels: KernelSet, max_model_len: int
) -> tuple[str, ...]:
    """Say what layers ask for, who computes it and what it does not save; nothing if all are plain.

    Parameters
    ----------
    asked : mapping of int to AttentionOptions
    kernels : KernelSet
    max_model_len : int
    """
    special = sum(not options.is_plain for options in asked.values())
    if not special:
        return ()
    of = f"of {len(asked)} layers"
    windows = Counter(o.window for o in asked.values() if o.window is not None)
    caps = Counter(o.softcap for o in asked.values() if o.softcap is not None)
    sinks = sum(o.sinks is not None for o in asked.values())
    parts = [
        *(f"a window of {window:,} tokens in {n} {of}" for window, n in sorted(windows.items())),
        *(f"scores capped at {cap:g} in {n} {of}" for cap, n in sorted(caps.items())),
        *([f"sinks in {sinks} {of}"] if sinks else []),
    ]
    backend = next(name for operation, name, _ in kernels.report if operation == "decode")
    by = {
        "sdpa": "reference, slowly, since sdpa knows none of it",
        "torch": "torch, but prompts by reference, slowly" if caps or sinks else "torch",
    }.get(backend, backend)
    lines = [f"attention: {', '.join(parts)}; computed by {by}"]
    if windows:
        lines.append(
            f"K and V outside of windows stay in the pool for now: {sum(windows.values())} {of}"
            f" take room for up to {max_model_len:,} tokens a request, and need"
            f" {max(windows):,} at most"
        )
    return tuple(lines)


def _window(window: int | None) -> str:
    return "no window" if window is None else f"a window of {window:,} tokens"
