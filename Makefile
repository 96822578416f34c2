# The README's two commands, and what a maintainer runs.
.PHONY: setup demo test test-random test-faults test-hosts test-slurm test-all lint pyodide

PYTHON ?= python3
RUN := .venv/bin/python
unexport PYTHONDONTWRITEBYTECODE  # each shard, and each command that a test starts, would compile all files again

setup: .venv/.done

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

# Train a small model on the text that every machine has.
demo: setup
	$(RUN) -m penteract train --preset tiny $(ARGS)

lint: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	.venv/bin/basedpyright & other=$$!; .venv/bin/basedpyright -p pyrightconfig.engine.json; engine=$$?; \
	wait $$other && exit $$engine

# Three shards beside each other, then what has ranks or is timed (tests/shards.py); one summary of all.
test: lint
	$(RUN) -m pytest tests -n 3 --dist loadfile --hypothesis-profile=ci

# The same tests in one process, in an order that nothing made: `make test-random SEED=…` repeats one.
SEED ?= $(shell date +%s)
test-random: setup
	$(RUN) -m pytest tests --random-order-bucket=global --random-order-seed=$(SEED) --hypothesis-profile=ci

# Saves in the background, killed and failing at each of their file operations. Then
# 200 runs that are killed and resumed, and 1,500 damaged checkpoints, drawn by a seed; resumable. `make test-faults
# PART="--seconds 600"` draws for so long. The last result is benchmarks/results/test_faults.json.
test-faults: setup
	ALL_CRASH_POINTS=1 $(RUN) -m pytest tests/faults/test_background.py -q
	$(RUN) tests/faults_long.py $(PART)

# Runs over two and four hosts, which are namespaces of this machine, with torchrun between them: links that are slow or cut,
# and a host that goes. It needs root, iproute2 and util-linux. The last result is benchmarks/results/test_hosts.json.
test-hosts: setup
	$(RUN) -m pytest tests/hosts/of_runs.py -s --durations=5

# Runs and sweeps under a Slurm that is started here: two nodes on this machine, in a temporary folder, on free ports. It
# needs root and Debian's slurm-wlm, munge, slurmdbd and mariadb-server.
test-slurm: setup
	$(RUN) -m pytest tests/slurm/of_runs.py tests/slurm/of_sweeps.py tests/slurm/of_harness.py -x --durations=5

# 20 by 19 pairs of layouts that read each other's checkpoints, 10,000 steps whose memory must stay flat, hosts,
# 10,000 drawn inputs, 2,000 layouts asked in any order, 40 questions whose every layout is simulated, properties of
# layouts with five times as many draws, all cases of sweeps of which `make test` has every kind, every recipe of
# precision for 300 steps, twelve rehearsals beside their runs,
# and every layout of 2, 4 and 8 ranks; the last are resumable. Their last results are in benchmarks/results: reshard_380.json, soak_10000.json, drawn_10000.json,
# asked_2000.json, planned_40.json, drawn_wide.json, precision_300.json, rehearsed_12.json and test_all.json.
test-all: test test-faults test-hosts pyodide
	$(RUN) tests/reshard_long.py
	$(RUN) tests/soak_long.py
	$(RUN) tests/drawn_long.py
	$(RUN) tests/asked_long.py
	$(RUN) tests/planned_long.py
	$(RUN) tests/wide_long.py
	$(RUN) tests/precision_long.py
	$(RUN) tests/rehearsed_long.py
	$(RUN) tests/sweep.py
	$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test,plot]"
	$(RUN) tests/notebook.py

# What is above the torch line, in a browser's Python under node: the same answers to the last digit.
pyodide: setup
	$(RUN) tests/pyodide/check.py
