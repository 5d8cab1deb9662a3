"""What a restart costs: time to the first token of a long prompt, before and after SIGKILL.

A process with a disk tier answers a prompt once and is killed. A new one gets the same prompt. Both
times are from the call to the first token, in the engine, weights loaded before. The greedy tokens
must be equal, and all of the prompt but its last block must come from the disk.

    python benchmarks/restart_warm.py --tokens 7500 --json
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvist.lab.report import environment

PUBLISHED_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--text", type=Path, help="take the prompt from a text, not from chance")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with tempfile.TemporaryDirectory(prefix="kvist-restart-") as folder:
        first = run(args, folder, kill=True)
        second = run(args, folder, kill=False)
    result = {
        "prompt_tokens": first["prompt_tokens"],
        "ttft_recompute_s": first["ttft_s"],
        "ttft_warm_s": second["ttft_s"],
        "ratio": round(first["ttft_s"] / second["ttft_s"], 1),
        "cached_tokens": second["cached_tokens"],
        "tokens_equal": first["tokens"] == second["tokens"],
        "dtype": args.dtype,
        "codec": args.codec,
    }
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
        return
    for name, value in result.items():
        print(f"{name:<18} {value}")


def run(args: argparse.Namespace, folder: str, *, kill: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the engine's process ended with {process.wait()}")
        if kill:
            time.sleep(PUBLISHED_S)
            process.send_signal(signal.SIGKILL)
        else:
            process.terminate()
    return json.loads(line)


def child(args: argparse.Namespace) -> None:
    from kvist import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.tokens + args.output,
        tiers=[f"disk:{args.size}:{args.child}/kv:{args.codec}"],
    )
    prompt = prompt_of(llm, args)
    # What happens only once, happens now.
    llm.generate([prompt[:1]], SamplingParams(max_tokens=2, temperature=0.0))
    start, ttft_s = time.perf_counter(), 0.0
    params = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True)
    for output in llm.stream(prompt, params):
        if not ttft_s and output.outputs[0].token_ids:
            ttft_s = time.perf_counter() - start
    told = {
        "prompt_tokens": len(prompt),
        "ttft_s": round(ttft_s, 4),
        "cached_tokens": output.num_cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
    }
    print(json.dumps(told), flush=True)
    signal.pause()


def prompt_of(llm: Any, args: argparse.Namespace) -> list[int]:
    if args.text is not None:
        return llm.tokenizer.encode(args.text.read_text()[: 8 * args.tokens])[: args.tokens]
    rng = random.Random(0)
    return [rng.randrange(llm.runner.vocab_size) for _ in range(args.tokens)]


if __name__ == "__main__":
    main()
