#!/usr/bin/env python3
"""Tests of the stub libraries themselves: selftest.py [--asan] [CASE...]

Builds them into a folder of their own (or takes those in FAKE_CUDA_OUT), then runs each case in a process of its own, as most of what they do
is chosen by the environment. --asan adds the cases that compile kernels with AddressSanitizer.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True  # whoever builds the libraries may look at what is in this folder
sys.path.insert(0, str(HERE / "selftest"))
from cases import CASES  # noqa: E402
import driver, streams, products, collectives, sanitizer  # noqa: E401, E402, F401 (they register their cases)


def run(name, libraries, work):
    """What is wrong with a case, or None, and what it said."""
    case = CASES[name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FAKE_", "CUDA_"))}
    environment.update(FAKE_CUDA_OUT=libraries, FAKE_CUDA_CACHE=str(work / "cache"), **case.environment)
    if "FAKE_CUDA_ASAN" in case.environment:
        found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment["LD_PRELOAD"] = found.stdout.strip()
    try:
        done = subprocess.run([sys.executable, __file__, "--run", name], env=environment, cwd=work, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired as late:
        return "it did not end", str(late.stderr)
    said = done.stdout + done.stderr
    if case.dies:
        wrong = None if done.returncode and case.dies in said else f"it did not die of \"{case.dies}\""
    elif done.returncode:
        wrong = f"exit code {done.returncode}"
    else:
        wrong = None
        if case.check:
            try:
                case.check(done, work)
            except AssertionError as error:
                wrong = repr(error)
    return wrong, said


def main(arguments):
    asan = "--asan" in arguments
    wanted = [a for a in arguments if a != "--asan"]
    wanted = wanted or [name for name, case in CASES.items() if not case.peer and (asan or "FAKE_CUDA_ASAN" not in case.environment)]
    failed = []
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        libraries = os.environ.get("FAKE_CUDA_OUT")
        if not libraries:
            libraries = str(work / "lib")
            subprocess.run([HERE / "build.sh", libraries], check=True)
        for name in wanted:
            began = time.time()
            wrong, said = run(name, libraries, work)
            print(f"{'FAILED' if wrong else 'ok':6} {name} ({time.time() - began:.1f} s)", flush=True)
            if wrong:
                print(f"  {wrong}\n{said}"[:4000])
                failed.append(name)
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        CASES[sys.argv[2]].run(*sys.argv[3:])
    else:
        main(sys.argv[1:])
