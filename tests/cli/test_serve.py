"""`tinyvllm serve` before anything is served: what it needs, what it warns of, where it listens."""

import importlib.util
import logging
import os
import socket

import pytest

from tinyvllm.cli.main import main
from tinyvllm.cli.serve import bind
from tinyvllm.serve.config import ServeConfig
from tinyvllm.util import InputError


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    assert main(["serve", "model"]) == 1
    err = capsys.readouterr().err
    assert "serve needs uvicorn: pip install 'tinyvllm[serve]'" in err


@pytest.mark.parametrize(("options", "warned"), [([], True), (["--api-key", "k"], False)])
def test_an_open_door_is_warned_of(options, warned, caplog, capsys):
    with socket.create_server(("0.0.0.0", 0)) as taken, caplog.at_level(logging.WARNING):
        port = str(taken.getsockname()[1])
        assert main(["serve", "m", "--host", "0.0.0.0", "--port", port, *options]) == 1
    assert ("without an API key" in caplog.text) is warned
    assert "cannot listen there" in capsys.readouterr().err


def test_the_key_of_the_environment_is_taken_and_an_empty_one_refused(monkeypatch, capsys):
    monkeypatch.setenv("TINYVLLM_API_KEY", "")
    assert main(["serve", "m", "--port", "0"]) == 1
    assert "api_key is empty" in capsys.readouterr().err
    # The engine and what it starts need not know it.
    assert "TINYVLLM_API_KEY" not in os.environ


def test_a_host_without_an_address_is_an_error():
    with pytest.raises(InputError, match=r"host=no-such-host\.invalid"):
        bind(ServeConfig(host="no-such-host.invalid"))
    with bind(ServeConfig(port=0)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1" and sock.getsockname()[1] > 0


def test_the_default_model_is_served_by_its_name_and_not_by_its_path(monkeypatch):
    from tinyvllm.api.async_llm import AsyncLLM
    from tinyvllm.serve import server

    served = []
    monkeypatch.setattr("tinyvllm.model.hub.default_model", lambda: "/home/me/a.gguf")
    monkeypatch.setattr("tinyvllm.cli.serve.EngineProcess", lambda config: config)
    monkeypatch.setattr(AsyncLLM, "from_process", lambda process: process)
    monkeypatch.setattr(
        server, "run", lambda llm, sock, config, verbose: served.append((llm, config)) or 0
    )
    for options in ([], ["--served-model-name", "mine"]):
        assert main(["serve", "--port", "0", *options]) == 0
    (llm, config), (_, named) = served
    assert llm.model == "/home/me/a.gguf"
    names = ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert config.served_model_name == names
    assert named.served_model_name == ("mine",)
