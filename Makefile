READY := .venv/.ready
DEMO_READY := .venv/.demo-ready

# pyright comes whole in its wheel; this stops it from asking the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1
# Hundreds of processes import durable: each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo pipeline test quick fuzz simulate differential mutants mutate chaos soak check docs wheel screenshots lowest pythons bench bench-gate load clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with everything that the demo and the tests need

$(READY): requirements/dev.txt pyproject.toml scripts/setup.sh
	@scripts/setup.sh requirements/dev.txt
	@touch $@

$(DEMO_READY): requirements/demo.txt pyproject.toml scripts/setup.sh
	@scripts/setup.sh requirements/demo.txt
	@touch $@

demo: $(if $(wildcard $(READY)),setup,$(DEMO_READY)) ## Two services on an embedded Postgres; a node is killed and nothing is lost (TRANSPORT=tcp|http|rabbitmq, CONSOLE=1)
	@$(if $(filter rabbitmq,$(TRANSPORT)),scripts/rabbitmq.sh)
	@.venv/bin/durable-agent demo $(if $(TRANSPORT),--transport $(TRANSPORT)) $(if $(CONSOLE),--console)

pipeline: setup ## The demo with all flights, then its history: archive, audit, report, replay (FLIGHTS=n)
	@scripts/java.sh
	@.venv/bin/durable-agent demo $(if $(FLIGHTS),--flights $(FLIGHTS),--all) --pipeline build/pipeline/$(or $(FLIGHTS),all)

test: setup ## Run every test, after the quick checks (JOBS=n workers, each with its own servers; PART=2/4 for one machine of four)
	@scripts/rabbitmq.sh tests
	@scripts/pgbouncer.sh
	@scripts/chromium.sh
	@scripts/java.sh
	@.venv/bin/python -m tests.support.quick_spark
	.venv/bin/ruff check
	.venv/bin/lint-imports
	scripts/test.sh "$(JOBS)" "$(PART)"

quick: setup ## Run the unit tests, and the contract in memory, with few generated examples and no server
	.venv/bin/pytest -q -n $(or $(JOBS),$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal --hypothesis-profile quick \
		-k "not rabbitmq and not (contract and postgres)" tests/unit tests/contract

fuzz: setup ## Fuzz everything that reads what others write; failing inputs are kept in .fuzz (MINUTES=n, TARGETS="wire ...")
	.venv/bin/python -m tests.fuzz hunt $(or $(MINUTES),10) $(TARGETS)

simulate: setup ## Run the agents under seeded faults on virtual time; a failing seed is shrunk (SEEDS=n, FIRST=n, JOBS=n)
	.venv/bin/python -m tests.simulation --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0) --jobs $(or $(JOBS),$(shell getconf _NPROCESSORS_ONLN))

differential: setup ## Run random workloads in memory and in every real world; a difference is shrunk and printed (EXAMPLES=n, SEED=n)
	@scripts/rabbitmq.sh
	.venv/bin/python -m tests.differential --examples $(or $(EXAMPLES),50) --seed $(or $(SEED),1)

mutants: setup ## Take each guard away, and see a named test fail (ONLY="words of its name", JOBS=n)
	@scripts/rabbitmq.sh
	@nice -n 5 .venv/bin/python -m tests.mutants $(ONLY) --jobs $(or $(JOBS),2) --json build/mutants.json

mutate: setup ## Change the modules of the guarantees by the operators of Cosmic Ray, and see tests fail (ONLY="rooms or files", SEED=n, SAMPLE=n mutants, 0 for all)
	@nice -n 5 .venv/bin/python -m tests.mutants.operators $(ONLY) --seed $(or $(SEED),1) --sample $(or $(SAMPLE),250) --json build/mutate.json

chaos: setup ## Break real processes and servers under traffic, and judge what became of it (PROFILE=pr|nightly|release, TRANSPORT=tcp|http|rabbitmq, SEED=n, MINUTES=n)
	@$(if $(filter rabbitmq,$(TRANSPORT)),scripts/rabbitmq.sh)
	@scripts/pgbouncer.sh
	@nice -n 5 .venv/bin/python -m tests.chaos --profile $(or $(PROFILE),pr) --transport $(or $(TRANSPORT),tcp) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

soak: setup ## Run two services under constant load and a fault a minute, and see that nothing grows (HOURS=n, PACE=transactions a second, SEED=n)
	@nice -n 5 .venv/bin/python -m tests.soak --hours $(or $(HOURS),2) $(if $(PACE),--pace $(PACE)) $(if $(SEED),--seed $(SEED))

check: setup docs ## Check style, types, the floors, the pages, the requirements for known vulnerabilities, and the costs of messages
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pyright
	.venv/bin/lint-imports
	scripts/audit.sh
	.venv/bin/python -m tests.benchmarks.costs

# Without --quiet, which hides warnings from strict too: a dead link would pass.
docs: setup ## Build the documentation in build/site, with the reference from the code
	.venv/bin/mkdocs build

wheel: setup ## Build the wheel in dist
	.venv/bin/python -m build --wheel --no-isolation

screenshots: setup ## Make the pictures of the console in docs/images anew
	@scripts/chromium.sh
	.venv/bin/python -m tests.browser.screenshots docs/images

lowest: setup ## Run the tests without brokers on the lowest versions of the libraries that are allowed
	scripts/lowest.sh

pythons: setup ## Run the unit tests on every newer Python of the machine
	scripts/pythons.sh

bench: setup ## Run the benchmarks: messages, then bulk work on Spark; or durable beside other libraries (PEERS=1)
	@scripts/rabbitmq.sh
	@$(if $(PEERS),scripts/peers.sh,scripts/java.sh && scripts/jdbc.sh)
	.venv/bin/python -m tests.benchmarks $(if $(PEERS),--only peers)

bench-gate: setup ## Count what each message costs the database, and fail when it has grown (RENEW=1 keeps it, RABBITMQ=1)
	@$(if $(RABBITMQ),scripts/rabbitmq.sh)
	.venv/bin/python -m tests.benchmarks.costs $(if $(RENEW),--renew) $(if $(RABBITMQ),--rabbitmq)

load: setup ## Load a web service, then a storm of failures, then the pipeline with a million rows
	.venv/bin/python -m tests.load
	.venv/bin/python -m tests.load.storm
	.venv/bin/python -m tests.load.pipeline

clean: ## Remove what was built and cached; .venv stays
	rm -rf build dist *.egg-info .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
