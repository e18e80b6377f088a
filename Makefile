# The two commands of the project. Both set up what they need in .venv first (tools/setup.sh).
# Recipes use relative paths only, so that a checkout may lie under a path with a space.
.POSIX:
.PHONY: demo test setup lint docs clean

# The model that `make demo` trains: `make demo MODEL=demo-qwen` for Qwen3's form.
MODEL = demo

demo: setup
	@.venv/bin/python -m benchmarks.demo --config $(MODEL)

test:
	@sh tools/setup.sh test
	@sh tools/test.sh

setup:
	@sh tools/setup.sh

lint: setup
	@sh tools/lint.sh

# The documentation site, in an environment of its own (tools/docs.sh).
docs:
	@sh tools/docs.sh

clean:
	rm -rf .venv _build runs
