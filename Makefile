# Two commands do everything: `make demo` and `make test`. Each makes .venv from the lock when it is needed.

# The newest Python that runs and can make a venv; another with PYTHON=... A name on the path says neither: that of pyenv
# ends with an error where its version is not chosen, and Debian has the module in a package of its own. The lock has what
# each Python gets: JAX 0.10.2 for 3.11, JAX 0.12.0.1 for later ones.
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for python in python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip' >/dev/null 2>&1 && echo $$python && break; done)
endif
BIN := .venv/bin

# Where the environment says to write no bytecode, as images of containers do, each of the hundreds of processes that
# tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test matrix exhaustive quick lint style format hooks lock sbom audit docs site outputs references exports clean

demo: .venv/installed
	$(BIN)/meshwright demo

# pyright runs beside the tests, and is printed after them: it works on one core, for a sixth of the time.
test: style
	@$(BIN)/pyright >.venv/types.txt 2>&1 & types=$$!; trap "kill $$types" INT TERM; \
	$(BIN)/pytest -n 2 --dist worksteal -m "not matrix and not exhaustive"; tests=$$?; \
	wait $$types; types=$$?; echo $(BIN)/pyright; cat .venv/types.txt; exit $$((tests + types))

# The combinations that `make test` leaves out; CI runs both.
matrix: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m "matrix and not exhaustive"

# More cases of what `make matrix` runs: other families, meshes and inputs, and every two mechanisms of training together.
exhaustive: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal -m exhaustive

quick: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not matrix and not exhaustive"

lint: style
	$(BIN)/pyright

style: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Lint and types before each commit, as .pre-commit-config.yaml says.
hooks: .venv/installed
	$(BIN)/pre-commit install

# Needs uv (pip install uv); the lock itself installs with pip alone, on every Python from 3.11 on (--universal: a line
# for each, with the condition that it is for). cuDNN is there to compile for GPUs, which takes its
# own library only; the packages that it runs with, half a gigabyte, stay out.
lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header -q \
		--no-emit-package nvidia-cublas --no-emit-package nvidia-cuda-nvrtc requirements.in -o requirements.lock

.venv/installed: requirements.lock pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.11, 3.12 or 3.13 runs here; install one, or name it: make PYTHON=/path/to/python))
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

# The packages of the lock with their licences, as CycloneDX.
sbom: .venv/installed
	mkdir -p build
	$(BIN)/python .ci/sbom.py -o build/sbom.json

# Known vulnerabilities of the packages in the lock; a line says so where the advisories cannot be reached.
audit: .venv/installed
	$(BIN)/python .ci/sbom.py --audit

# The site, build/site/html/index.html: the documents, the lessons with their outputs, and pages made from the code.
docs: site

site: .venv/installed
	$(BIN)/python site/build.py

# The outputs of all commands in README.md and docs/ anew, after a screen or a figure has changed.
outputs: .venv/installed
	$(BIN)/python tests/test_documents.py --matrix README.md docs/*.md

# What transformers computes on tiny models of every family; neither it nor torch is needed for anything else.
references:
	$(PYTHON) -m venv .venv-references
	.venv-references/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 sentencepiece==0.2.3 peft==0.21.2
	.venv-references/bin/python tests/references/make_references.py
	.venv-references/bin/python tests/references/make_odd.py
	.venv-references/bin/python tests/references/make_mutations.py
	.venv-references/bin/python tests/references/make_sentencepiece.py
	.venv-references/bin/python tests/references/make_tokenizers.py
	.venv-references/bin/python tests/references/make_adapters.py
	$(MAKE) exports

# Whether transformers takes what we save of each golden, and PEFT each adapter; what they say is kept.
exports: .venv/installed
	rm -rf .venv-references/exports
	JAX_PLATFORMS=cpu $(BIN)/python tests/references/write_exports.py .venv-references/exports
	.venv-references/bin/python tests/references/check_exports.py .venv-references/exports 2>/dev/null > tests/references/exports.txt
	cat tests/references/exports.txt
	rm -rf .venv-references/adapters
	$(BIN)/python tests/references/write_adapters.py .venv-references/adapters
	.venv-references/bin/python tests/references/check_adapters.py .venv-references/adapters 2>/dev/null > tests/references/adapters.txt
	cat tests/references/adapters.txt

clean:
	rm -rf .venv .venv-references .venv-audit
