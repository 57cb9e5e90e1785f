"""One server for all tests that do it no harm, and the official client."""

import pytest
from serving import chat_model, serving


@pytest.fixture(scope="session")
def model(golden, tmp_path_factory):
    """A tiny model with a chat template."""
    return chat_model(golden, tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def server(model):
    with serving(
        model, "--served-model-name", "tiny", "--served-model-name", "org/tiny"
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test on the shared server all blocks are free and nothing runs."""
    yield
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "tinyvllm:kv_blocks_used",
        )
        for _ in range(100):
            left = [running.metric(name) for name in names]
            if not any(left):
                break
        assert left == [0, 0, 0]
