"""Runs a script in a separate environment with TRL, runs/trl-env (about 1.5 GB), created at the first start.

    python examples/trl_env.py examples/trl_grpo.py --loss forest

dccot itself comes from this checkout. No model is fetched from a hub.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs/trl-env"
# torch first: without a GPU its CPU build must be there before anything else asks for it.
PACKAGES = (["torch==2.13.0"], ["trl==1.16.0", "transformers==5.22.2", "accelerate==1.15.0", "numpy==2.3.5"])


def main() -> None:
    if not (FOLDER / "ready").exists():
        print(f"installing TRL into {FOLDER} (a few minutes)", file=sys.stderr, flush=True)
        venv.create(FOLDER, with_pip=True, clear=True)
        for packages in PACKAGES:
            subprocess.run([FOLDER / "bin/pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
        (FOLDER / "ready").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    os.execve(FOLDER / "bin/python", [str(FOLDER / "bin/python"), *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
