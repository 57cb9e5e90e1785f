"""One sequence on its way through the engine: its tokens, its progress and what it holds."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from tinyvllm.engine.row_lists import RowLists
from tinyvllm.memory.prefix_cache import CachedBlock
from tinyvllm.outputs import TokenLogprobs
from tinyvllm.sampling_params import SAMPLERS, SamplingParams
from tinyvllm.util import InputError


class RequestStatus(enum.Enum):
    """What a request holds.

    WAITING: no slot and no blocks. RUNNING: a slot. SWAPPED: no slot, and the copies of its blocks
    in the swap space, with which it waits. FINISHED: nothing any more.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """A prompt, its parameters, the tokens generated so far, and the scheduler's books about it.

    priority: the lower, the more urgent, as in vLLM.
    parent: a request added before with the same prompt, of which this is another sample: it shares
        the blocks of the prompt while the parent runs.
    index: which of the samples of one prompt this is.

    The scheduler alone writes the output tokens, `parent` and the fields from `status` on; the
    engine sets `row_lists` and appends log-probabilities.
    """

    __slots__ = (
        "arrival",
        "arrival_step",
        "block_ids",
        "cached_block",
        "cumulative_logprob",
        "decoding",
        "finish_reason",
        "host_block_ids",
        "index",
        "logprobs",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_copies",
        "num_kept_blocks",
        "num_preemptions",
        "num_tokens",
        "output_token_ids",
        "params",
        "parent",
        "priority",
        "prompt",
        "prompt_array",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "returning",
        "row_lists",
        "sampler",
        "slot",
        "status",
        "stop_reason",
        "stop_set",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        eos_token_ids: Iterable[int] = (),
        prompt: str | None = None,
        *,
        priority: int = 0,
        parent: Request | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.parent = parent
        self.index = index
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_array: np.ndarray | None = None  # the same as int32, from `validate` on
        self.params = params
        self.sampler = SAMPLERS.index(params.sampler)  # of a step's rows the largest counts
        self.row_lists: RowLists = {}  # of the row's states, for the "adjust" sampler
        eos = () if params.ignore_eos else eos_token_ids
        # Every token that ends the request with reason "stop".
        self.stop_set = frozenset(eos).union(params.stop_token_ids)

        self.output_token_ids: list[int] = []
        # One entry for each output token, with params.logprobs; the sum over the chosen tokens.
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        # One entry for each prompt token, with params.prompt_logprobs; the first is None. Chunks
        # computed again after a preemption add nothing: their entries are there already.
        self.prompt_logprobs: list[TokenLogprobs | None] = []

        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # Set by Scheduler.add: the place in the order of arrival, the number of steps before, and
        # the most tokens, prompt included, before the request ends with reason "length".
        self.arrival = -1
        self.arrival_step = 0
        self.max_total_tokens = 0
        # Counts, not values: a token counts from the moment that its step is scheduled, so that
        # the next step can be scheduled before the token is read back.
        self.num_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0  # K and V of tokens [0, this) are, or will be, in its blocks
        # True once a token was sampled since the last admission: the next step's input token is
        # then in the device's row state, and only there until it is read back.
        self.decoding = False
        self.slot: int | None = None
        self.block_ids: list[list[int]] = []  # one table a KV group, all of equal length
        self.num_kept_blocks = 0  # a table's first blocks, offered to the prefix cache
        self.cached_block: CachedBlock | None = None  # the last of these there; None: offers none
        # Copies of the first blocks of each table in the swap space; [] without any.
        self.host_block_ids: list[list[int]] = []
        self.num_copies = 0  # batches of copies of its blocks that are under way
        self.returning = False  # swapped blocks are on their way to its new ones
        self.num_cached_tokens = 0  # of the prompt, not computed at the first admission
        self.num_preemptions = 0

    @property
    def finished(self) -> bool:
        """True from the final token, or the abort, on."""
        return self.status is RequestStatus.FINISHED

    @property
    def num_host_blocks(self) -> int:
        """The first entries of its tables that have copies in the swap space."""
        return len(self.host_block_ids[0]) if self.host_block_ids else 0

    @property
    def may_share(self) -> bool:
        """True when K and V of its tokens may come from others: no more than that is needed."""
        return self.params.prompt_logprobs is None and not self.params.counted

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose values the host has; fewer than `num_tokens` while a step is in flight."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Values of the known tokens [start, stop) of the prompt followed by the output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(0, start - num_prompt) : stop - num_prompt]
        return self.prompt_token_ids[start:] + output

    def copy_tokens(self, start: int, out: np.ndarray) -> None:
        """Writes the known tokens from `start` on to `out`, int32, as many as it holds.

        Steps copy whole prompts, so their values are converted once, by `validate`.
        """
        stop = start + len(out)
        if stop <= len(self.prompt_token_ids):
            assert self.prompt_array is not None, f"{self} was not validated"
            out[:] = self.prompt_array[start:stop]
        else:
            out[:] = self.tokens(start, stop)

    def validate(self, max_model_len: int, vocab_size: int) -> None:
        """Raise InputError unless the prompt leaves room for a token and all ids are tokens."""
        name, num_prompt = f"request {self.request_id!r}", len(self.prompt_token_ids)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InputError(f"{name}: priority={self.priority!r}: must be an integer")
        if num_prompt == 0:
            raise InputError(f"{name}: the prompt is empty; it needs at least 1 token")
        if num_prompt > max_model_len - 1:
            raise InputError(
                f"{name}: the prompt has {num_prompt} tokens; it may have {max_model_len - 1}, so "
                f"that with one generated token it fits in max_model_len={max_model_len}"
            )
        for option in ("logprobs", "prompt_logprobs"):
            value = getattr(self.params, option)
            if value is not None and value > vocab_size:
                raise InputError(f"{name}: {option}={value}: the model has {vocab_size} tokens")
        self.prompt_array = _checked(name, "prompt", self.prompt_token_ids, vocab_size)
        _checked(name, "stop_token_ids", self.params.stop_token_ids, vocab_size)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, slot={self.slot}, "
            f"{len(self.prompt_token_ids)} prompt + {len(self.output_token_ids)} output tokens, "
            f"{self.num_computed_tokens} of {self.num_tokens} computed)"
        )


def _checked(name: str, what: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The ids as int32; InputError unless each is a token."""
    # The usual case without a look at each by itself: hundreds of prompts may have to be checked
    # before the first step begins. What does not fit in 64 bits without a sign is no token.
    if set(map(type, ids)) == {int}:
        with suppress(struct.error):
            array = np.frombuffer(struct.pack(f"{len(ids)}Q", *ids), np.uint64)
            if array.max() < vocab_size:
                return array.astype(np.int32)
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"{name}: {what}[{i}]={token!r}: a token id is an integer")
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{name}: {what}[{i}]={token}: token ids are from 0 to {vocab_size - 1}"
            )
    return np.array(ids, np.int32)
