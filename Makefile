# The verbs of this project; `make` alone lists them. They run the same here and in CI (.ci/run).
.DEFAULT_GOAL := help
.PHONY: help build demo test quick soak lint simulate simulator-check mutants crash-points crash rot fuzz hostile bench bench-against bench-backlog wheels test-pythons docs format rust-test python-test python-test-together python-test-alone wire wire-check guarantees test-with-real-processes test-with-simulated-ones

SHELL := bash
.SHELLFLAGS := -o pipefail -c

SEEDS ?= 500
FUZZ_SECONDS ?= 60
TARGETS ?= journal frames broker slots
HOSTILE ?= 100000
export CARGO_TARGET_DIR ?= $(CURDIR)/target
export PYO3_PYTHON ?= $(CURDIR)/.venv/bin/python

# What tests draw depends on the commit alone, so a red run is the commit's. `make soak` draws others.
chance = $(or $(SEED),$(shell git rev-parse --short=8 HEAD 2>/dev/null),1)
export PROPTEST_RNG_SEED ?= 1
# These would be written between the sources.
export PROPTEST_DISABLE_FAILURE_PERSISTENCE ?= 1
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.ran/pycache
# Tests start thousands of Python processes. Without kept bytecode each compiles the standard library again.
unexport PYTHONDONTWRITEBYTECODE

python := .venv/bin/python
# Tests and the simulator are compiled once, together: one profile, all packages, and in both the fault points and planted
# bugs of crates/penstock-faults, which do nothing outside of a simulation. A release with them does not compile. What
# runs for hours is worth a profile of its own: PROFILE=simulate.
together := --features penstock-sim/faults
# Cargo would look for the jobserver that MAKEFLAGS names, which recipes without a `+` can't reach.
simulator = env -u MAKEFLAGS cargo build --quiet $(together) --bin penstock-sim $(if $(PROFILE),--profile $(PROFILE)) && \
	$(idly) $(CARGO_TARGET_DIR)/$(or $(PROFILE),debug)/penstock-sim
# A process of this class runs only where no other wants to. One of low priority keeps another waiting for each time slice
# that it has begun: beside it, the tests of the drivers took three times as long.
idly := $(if $(shell chrt --idle 0 echo may 2>/dev/null),chrt --idle 0,nice -n 19)
# A stamp over everything that is compiled: while it is newer, `make demo` starts at once.
compiled := $(shell find crates Cargo.toml Cargo.lock pyproject.toml tools/build_backend.py -type f -not -name '*.md')

help: ## list these verbs
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

build: .venv/.built ## build the extension module and the penstock program into .venv (release)

demo: .venv/.built ## run a real map-reduce over the standard library's source, beside a serial loop
	@$(python) -m penstock._demo

test: lint wire-check ## run every check: lints, types, Rust, simulator, Python
	@$(MAKE) --no-print-directory --jobs 2 test-with-real-processes test-with-simulated-ones
	@$(MAKE) --no-print-directory python-test-alone guarantees
	@echo "all checks passed"

# Real processes wait for one another half of the time. The simulator, which never waits, uses what they leave of the
# processors.
test-with-real-processes:
	@$(MAKE) --no-print-directory rust-test
	@$(MAKE) --no-print-directory python-test-together

test-with-simulated-ones:
	@$(MAKE) --no-print-directory simulate
	@$(MAKE) --no-print-directory simulator-check

quick: lint .venv/.built ## check what changes most often, within a minute: lints, broker scripts, the client's and the core's tests
	@cargo test --quiet $(together) --lib --test scripts
	@$(python) -m pytest -q -n 4 tests/api tests/core

lint: .venv/.ready ## check formatting, lints and types
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy
	$(python) -m basedpyright

simulate: ## run the simulator over SEEDS=500 seeds FROM=1, or replay and shrink one with SEED=8211 (all of it: WHOLE=1)
	@mkdir -p .ran
	@$(simulator) $(if $(SEED),--seed $(SEED) $(if $(WHOLE),--whole) $(if $(PLANT),--planted $(PLANT)),--seeds $(SEEDS) --from $(or $(FROM),1)) | tee .ran/simulate.txt

# The same seeds give the same runs in two processes, and the simulator still catches bugs.
simulator-check:
	@diff <($(simulator) --hashes $(or $(HASHES),20)) <($(simulator) --hashes $(or $(HASHES),20))
	@$(simulator) --mutants skip-sync confirm-before-sync forget-refusal lose-copy release-twice ignore-priority

mutants: ## plant each bug of the table in crates/penstock-faults, and see the simulator catch it
	$(simulator) --mutants $(PLANTS)

soak: .venv/.built ## look for what fixed seeds miss, until it is stopped: draws seeds for the simulator, properties and tests by force
	@while from=$$(shuf -i 1000000-999999999 -n 1); do \
		echo "seed $$from"; \
		$(MAKE) --no-print-directory simulate SEEDS=20000 FROM=$$from PROFILE=simulate && \
		PROPTEST_RNG_SEED=$$from PROPTEST_CASES=5000 cargo test --quiet $(together) && \
		$(python) -m pytest -q --hypothesis-profile=drawn --hypothesis-seed=$$from tests/api/test_values.py && \
		$(MAKE) --no-print-directory crash CYCLES=20 SEED=$$from || exit 1; \
	done

crash-points: ## cut the power at every call to the disk, in STATES=200000 states of small pieces of work
	CRASH_POINTS=$(or $(STATES),200000) cargo test --quiet --profile simulate $(together) --test crash_points -- --nocapture

crash: .venv/.built ## kill, stop, cut off and starve real processes, at full length with CYCLES=1000 (hours); SEED=, TESTS=
	@mkdir -p .ran
	CYCLES=$(or $(CYCLES),100) SEED=$(chance) CRASH_REPORT=$(or $(CRASH_REPORT),.ran/crash-report.txt) \
		$(python) -m pytest -q tests/crash $(if $(TESTS),-k "$(TESTS)")

rot: ## cut a golden journal at every byte, flip 50,000 of its bits, and repair what that leaves (a minute)
	PENSTOCK_LONG=1 cargo test --quiet $(together) --test journal -- golden bits repair

# Only the slots are shared memory, which takes unsafe code; the others run several times as often without a sanitizer.
fuzz: ## look for input that breaks something: FUZZ_SECONDS=60 for each of TARGETS="journal frames broker slots" (cargo install cargo-fuzz; nightly Rust)
	@mkdir -p .cache
	for target in $(TARGETS); do \
		case $$target in slots) sanitizer=address;; *) sanitizer=none;; esac; \
		cargo +nightly fuzz run --fuzz-dir fuzz $$target --sanitizer $$sanitizer --target-dir .cache/fuzz-$$sanitizer -- \
			-max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=512 -timeout=10 -max_len=4096 -print_final_stats=1 || exit 1; \
	done

hostile: ## send HOSTILE=100000 strangers, guesses and floods to servers of their own, and print what they cost
	HOSTILE_CONNECTIONS=$(HOSTILE) cargo test --quiet $(together) --test processes strangers -- --nocapture --test-threads 1

bench: .venv/.built ## compare Penstock with its peers; asks before it installs their servers (BENCH_INSTALL=1: yes)
	$(python) bench/run.py

bench-against: .venv/.built ## compare CPU a job with the built checkout in DIR=, over PAIRS=12 pairs (TARGET=, its CARGO_TARGET_DIR)
	$(python) bench/run.py --against $(DIR) $(if $(PAIRS),--pairs $(PAIRS)) $(if $(TARGET),--against-target $(TARGET))

bench-backlog: ## measure ten million waiting jobs (or BACKLOG_JOBS): rates, memory, restart
	cargo bench --quiet --package penstock-cli --bench backlog

wheels: .venv/.ready ## build a release into dist/: the sdist, and an audited wheel for each Linux target that rustup has (FOR=)
	@$(python) tools/wheels.py $(FOR)

docs: .venv/.built ## run every example in README.md and docs/, build the site into .ran/site, and the Rust docs
	$(python) -m pytest -q tests/docs
	$(python) -m sphinx --quiet --fail-on-warning --keep-going -d .ran/site-trees docs .ran/site
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet

format: .venv/.ready ## format all code
	cargo fmt --all
	$(python) -m ruff check --fix-only --quiet .
	$(python) -m ruff format --quiet .

# What passed is kept in .ran/, for docs/guarantees.md to be held against. Tests spend most of their time waiting, so
# six at once keep two processors busy, here and below.
rust-test:
	@mkdir -p .ran
	@env -u MAKEFLAGS RUST_TEST_THREADS=$${RUST_TEST_THREADS:-6} cargo test $(together) 2>&1 | tee .ran/rust.txt | grep -v -e '^test .* ok$$' -e '^$$'

# The generator takes longer to compile than all of the product takes to check, so it is asked only when something
# differs from what it was last seen to agree with.
wire_state = cat proto/penstock.proto crates/penstock-wire/src/generated.rs tools/generate-wire/Cargo.toml \
	tools/generate-wire/src/*.rs <(grep -A 2 -E '^name = "(prost|protox)' Cargo.lock) | sha256sum | cut -c 1-64

wire: ## write the protocol's code again, after a change in proto/ or tools/generate-wire
	cargo run --quiet --package generate-wire
	@$(wire_state) > proto/generated.sha256

wire-check:
	@[ "$$($(wire_state))" = "$$(cat proto/generated.sha256)" ] || { \
		cargo run --quiet --package generate-wire -- --check && \
		echo "the protocol's code is up to date; \`make wire\` notes that, and spares the next check its time"; }

# What only took too long (`only_rerun` in pyproject.toml) runs again: the machine may have had much else to do.
patient := --reruns 2 --reruns-delay 1 -r aR

python-test: python-test-together
	@$(MAKE) --no-print-directory python-test-alone

python-test-together: .venv/.built
	@mkdir -p .ran
	SEED=$(chance) $(python) -m pytest -n 6 $(patient) -m "not alone" --passed=.ran/python.txt

python-test-alone: .venv/.built
	$(python) -m pytest $(patient) -m alone --passed=.ran/alone.txt
	@cat .ran/alone.txt >> .ran/python.txt

test-pythons: .venv/.built ## run the Python tests on each supported Python found here (PYTHONS=3.12,3.13 TESTS=tests/api)
	SEED=$(chance) $(python) tools/test_pythons.py $(if $(PYTHONS),--pythons $(PYTHONS)) -q -n 6 $(patient) $(TESTS)

guarantees: .venv/.ready
	@$(python) tests/docs/guarantees.py

.venv/.ready: requirements/dev.txt tools/make-venv
	@echo "making .venv"
	@tools/make-venv

.venv/.built: .venv/.ready $(compiled)
	@$(python) tools/build_backend.py
	@echo "building the extension module"
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(python) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@
