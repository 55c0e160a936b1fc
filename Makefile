# Every target sets up what it needs: virtual environments with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
TF_BIN := .venv-tf/bin
COVERAGE_BIN := .venv-coverage/bin
INSTALL := install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-bounds fuzz test-slow test-tf check wheel bench bench-placers bench-coverage mutants schemas clean

demo: .venv/.ready
	$(BIN)/python examples/demo.py

# Files of tests go to as many processes as there are cores.
test: check
	$(BIN)/python -m pytest -n auto --dist loadfile

check: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests of compiled loops, with checks of every index. They compile anew for some minutes.
test-bounds: .venv/.ready-dev
	ROOST_BOUNDS_CHECK=1 $(BIN)/python -m pytest tests/simulator tests/placers tests/search/test_forged.py

# Changed files for every reader: about half an hour. FUZZ_INPUTS=1000 is a minute.
fuzz: .venv/.ready-dev
	FUZZ_INPUTS=$${FUZZ_INPUTS:-100000} $(BIN)/python -m pytest -m slow tests/fuzz

# What takes minutes, and what needs TensorFlow, which has an environment of its own.
test-slow: .venv/.ready-dev
	$(BIN)/python -m pytest -m slow

test-tf: .venv-tf/.ready
	$(TF_BIN)/python -m pytest -m tf tests/frontends/test_tensorflow.py

# The wheel, installed in an empty environment and tried there: it takes a minute or two.
wheel: .venv/.ready
	rm -rf dist .venv-wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip $(INSTALL) dist/*.whl
	cd dist && ../.venv-wheel/bin/python ../tests/wheel_smoke.py

bench: .venv/.ready
	$(BIN)/python benchmarks/speed/simulator.py
	$(BIN)/python benchmarks/speed/annealing.py

# An hour and more on two cores. It can be stopped and goes on; rows that are there are not measured again.
PARTS := auto ten starts bounds proof exact large page
bench-placers: .venv/.ready
	for part in $(PARTS); do $(BIN)/python benchmarks/placers.py $$part || exit 1; done

# Changes of one operator each, and those that no test notices. Hours; it can be stopped and goes on.
MUTANTS := --count 300
mutants: .venv/.ready-dev
	nice $(BIN)/python benchmarks/mutants.py run $(MUTANTS)

# Captures 112 models of other packages: half an hour on two cores. It can be stopped and goes on.
bench-coverage: .venv-coverage/.ready
	nice $(COVERAGE_BIN)/python benchmarks/capture/capture_coverage.py measure
	$(COVERAGE_BIN)/python benchmarks/capture/capture_coverage.py page

# The published JSON Schema of every file format; a test fails when they are out of date.
schemas: .venv/.ready
	$(BIN)/python -m roost.testing.schemas docs/schemas

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip $(INSTALL) -e '.[partition,exact]'
	touch $@

.venv/.ready-dev: .venv/.ready
	$(BIN)/pip $(INSTALL) -e '.[dev]'
	touch $@

.venv-tf/.ready: pyproject.toml constraints.txt
	test -x $(TF_BIN)/python || $(PYTHON) -m venv .venv-tf
	$(TF_BIN)/pip $(INSTALL) -e '.[tf]' pytest hypothesis
	touch $@

# Packages whose models the benchmark captures.
.venv-coverage/.ready: pyproject.toml constraints.txt
	test -x $(COVERAGE_BIN)/python || $(PYTHON) -m venv .venv-coverage
	$(COVERAGE_BIN)/pip $(INSTALL) -e '.[hf]' timm torchvision diffusers
	touch $@

clean:
	rm -rf .venv .venv-tf .venv-coverage .venv-wheel dist out
