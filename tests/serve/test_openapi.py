"""The server against its own OpenAPI document: generated requests, valid and not."""

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks

from tinyvllm.serve.app import create_routes

load_all_checks()
# Not "what the document allows is accepted": limits that depend on each other, on the model and
# on its tokenizer have no place in a schema.
CHOSEN = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    ]
)


# The description needs no engine.
schema = schemathesis.openapi.from_dict(create_routes(None).openapi())


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_answers_as_documented(case, server):
    if isinstance(case.body, dict):  # a request that is right may ask for a lot
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int) and case.body[name] > 8:
                case.body[name] = 8
    case.call_and_validate(checks=CHOSEN, base_url=server.url)
