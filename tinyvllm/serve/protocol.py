"""What requests may say: OpenAI's fields and vLLM's further ones; all others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tinyvllm.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from tinyvllm.util import InputError

MAX_N = 128
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"max_tokens", "logprobs", "logit_bias"}

MAX_FIELDS = 100
MAX_PROMPTS = 1 << 14  # of one request: checking more would hold up all others

# The first bad item of a list ends its check: a large body has no larger list of errors.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
# The engine looks at each of these while all others wait.
Word = Annotated[str, Field(max_length=1000)]
Words = Annotated[list[Word], Field(max_length=64, fail_fast=True)]
FewIds = Annotated[TokenIds, Field(max_length=1024)]


def _check_number_of_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"{len(value)} entries: at most {MAX_LOGIT_BIAS}")
    return value


Biases = Annotated[dict[str, float], BeforeValidator(_check_number_of_biases)]


class Strict(BaseModel):
    """A number is no text, and a field that nobody reads is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields: at most {MAX_FIELDS}")
        return data


class StreamOptions(Strict):
    """How a stream is sent."""

    include_usage: bool = False


class GenerationRequest(Strict):
    """What completions and chats have in common. None is the default, as if left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: Word | Words | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: Words | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: FewIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    # Accepted, and without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @property
    def num_samples(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """True when a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The engine's form of the options; `defaults` holds where the request says nothing."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream=true")
        values = {**defaults, "max_tokens": max_tokens, "logprobs": logprobs}
        for name in _SAMPLING & type(self).model_fields.keys():
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(k): v for k, v in self.logit_bias.items()}
        return SamplingParams(**values)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | Texts | TokenIds | ManyIds
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids; InputError without any."""
        prompt: Any = self.prompt
        if not prompt:
            raise InputError(f"prompt={prompt!r}: is empty")
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class ChatMessage(BaseModel):
    """One message. Further keys are for the model's template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ResponseFormat(Strict):
    """Text: other formats are not supported."""

    type: Literal["text"]


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        """Most tokens to generate; None: to the end of the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None reports nothing."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError(f"top_logprobs={self.top_logprobs}: only with logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Strict):
    """The body of /tokenize: a prompt, or messages to render with the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InputError(f"logit_bias[{text[:20]!r}]: a key must be a token id")
    return int(text)
