"""The server's options."""

import pytest

from tinyvllm.serve.config import ServeConfig
from tinyvllm.util import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": -1}, "port=-1"),
        ({"port": "80"}, "port='80'"),
        ({"max_body_bytes": 0}, "max_body_bytes=0"),
        ({"max_waiting_requests": -1}, "max_waiting_requests=-1"),
        ({"request_timeout": float("nan")}, "request_timeout=nan"),
        ({"api_key": " "}, "api_key is empty"),
        ({"api_key": "kéy"}, "printable ASCII"),
        ({"api_key": "a\nb"}, "printable ASCII"),
        ({"served_model_name": ["a", ""]}, "served_model_name"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        ServeConfig(**options)


def test_the_key_is_not_shown():
    assert "s3cret" not in repr(ServeConfig(api_key="s3cret"))


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("example.com", False),
    ],
)
def test_what_only_this_machine_reaches(host, local):
    assert ServeConfig(host=host).is_local is local
