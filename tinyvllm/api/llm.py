"""Offline inference: prompts in, results out in the same order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tinyvllm.api.interrupt import Interrupt, deferred_interrupt
from tinyvllm.api.tracing import EngineTrace
from tinyvllm.config import EngineConfig
from tinyvllm.driver.trace import Trace
from tinyvllm.engine.engine import LLMEngine
from tinyvllm.engine.request import Request
from tinyvllm.engine.stats import EngineStats
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.outputs import RequestOutput
from tinyvllm.progress import Progress
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.util import Closing, InputError, frozen_heap

Prompt = str | dict[str, Any]
Messages = list[dict[str, Any]]


class LLM(Closing):
    """A model ready to generate. Options are those of `EngineConfig`, with vLLM's names.

    An unknown option is a TypeError that names it; a value out of range, a model that cannot be
    read or does not fit is an InputError. Close it, or use it as a context manager, to free the
    device.

    `trace` is a file to write every CUDA call to, while it is made: a listing, or by its suffix
    JSON lines (.jsonl) or a trace for Perfetto (.json). On the CPU it gets the ops that run. One
    model at a time can be traced.
    """

    def __init__(
        self, model: str, *, trace: str | Path | Trace | None = None, **options: Any
    ) -> None:
        config = EngineConfig(model=model, **options)
        with ExitStack() as stack:  # closes the trace if the engine cannot start
            self._trace = stack.enter_context(EngineTrace(trace)) if trace else None
            self.engine = LLMEngine(config)
            stack.pop_all()
        if self._trace:
            self._trace.begin(self.engine)
        self._ids = itertools.count()
        # Outputs not yet handed out, by request: several streams may be read in turn.
        self._inbox: dict[str, list[RequestOutput]] = {}
        self._lock = threading.RLock()  # whoever needs news steps the engine for all
        # Taken before the lock, for as long as it takes to get that. Without it a thread that steps
        # in a loop takes the lock again before one that waits for it has woken up.
        self._turn = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, each text or {"prompt_token_ids": [...]}; results in their order.

        `sampling_params` is one for all prompts, or one each; without it the model's own defaults
        hold. `use_tqdm` shows a progress bar on a terminal. `priority` is one number a prompt,
        lower is more urgent. A bad prompt is an InputError before anything runs. After Ctrl-C it
        returns what there is, with the finish reason "abort" where a sequence had not ended; a
        second Ctrl-C is a KeyboardInterrupt.
        """
        batch = [prompts] if isinstance(prompts, (str, dict)) else prompts
        if not isinstance(batch, (list, tuple)):
            raise InputError(f"prompts must be a prompt or a list of them, not {prompts!r:.80}")
        params = self._params_each(sampling_params, len(batch))
        if priority is not None and len(priority) != len(batch):
            raise InputError(f"{len(priority)} priorities for {len(batch)} prompts: give one each")
        requests = {}
        for i, (prompt, p) in enumerate(zip(batch, params, strict=True)):
            request_id = str(next(self._ids))
            urgency = 0 if priority is None else priority[i]
            try:
                requests[request_id] = self.engine.make_requests(request_id, prompt, p, urgency)
            except InputError as error:
                raise InputError(f"prompts[{i}]: {error}") from None
        try:
            with deferred_interrupt() as interrupt, frozen_heap():
                for request_id, sequences in requests.items():
                    self._begin(request_id, sequences)
                self._run_until_done(set(requests), interrupt, use_tqdm)
            return [self._result(request_id) for request_id in requests]
        finally:
            for request_id in requests:  # after an error nothing of them may go on
                self._end(request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered with the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. Needs the extra `chat`.
        """
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations: Any = messages if several else [messages]
        prompts: list[Prompt] = [
            self.chat_prompt(c, add_generation_prompt=add_generation_prompt) for c in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self, messages: Messages, *, add_generation_prompt: bool = True
    ) -> dict[str, Any]:
        """The prompt that a conversation makes, for `generate` and `stream`: its token ids.

        InputError if the model has no chat template, or that refuses the messages.
        """
        text = self.engine.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt
        )
        return {"prompt_token_ids": self.get_tokenizer().encode_chat(text)}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding what is new after each token: text, ids, logprobs.

        Text is held back while a character is incomplete. Leaving the loop ends the request.
        Several streams may be read in turn, and by several threads.
        """
        (params,) = self._params_each(sampling_params, 1)
        request_id = str(next(self._ids))
        return self._stream(request_id, self.engine.make_requests(request_id, prompt, params))

    def _stream(self, request_id: str, sequences: list[Request]) -> Iterator[RequestOutput]:
        self._begin(request_id, sequences, stream=True)
        try:
            finished = False
            while not finished:
                for output in self._wait(request_id):
                    finished = output.finished
                    yield output
        finally:
            self._end(request_id)

    def stats(self) -> EngineStats:
        """What the engine holds and has done so far; may be called while other threads generate.

        It then waits for the end of the step that is being launched.
        """
        with self._locked_in_turn():
            return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; our defaults for the rest."""
        return SamplingParams(**self.engine.model.generation_defaults)

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until `wake_up`, as in vLLM; needs that nothing runs.

        Level 1 keeps the weights in pinned host memory; level 2 reads their files again on waking.
        The K and V of the prefix cache are lost. InputError for another level and while requests
        are unfinished, OutOfMemoryError where the host has no room for the weights.
        """
        with self._lock:
            self.engine.sleep(level)

    def wake_up(self) -> None:
        """Ends a sleep: allocates again and brings the weights back.

        After an error (files are gone, or memory is) it sleeps on and may be woken again.
        """
        with self._lock:
            self.engine.wake_up()
            if self._trace:
                self._trace.begin(self.engine)

    def is_sleeping(self) -> bool:
        """True from `sleep` to `wake_up`."""
        return self.engine.is_sleeping()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes, as in vLLM; False, with nothing done, while requests run."""
        with self._lock:
            return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Frees the device; the object cannot be used afterwards."""
        trace, self._trace = self._trace, None
        if trace is None:
            self.engine.close()
            return
        with trace, closing(self.engine):  # also after an error, in this order
            trace.end(self.engine)

    def _params_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(each, (list, tuple)):
            raise InputError(f"sampling_params: SamplingParams or a list of them, not {each!r:.80}")
        for i, p in enumerate(each):
            if not isinstance(p, SamplingParams):
                raise InputError(f"sampling_params[{i}] must be SamplingParams, not {p!r:.80}")
        if len(each) != count:
            raise InputError(
                f"{len(each)} sampling_params for {count} prompts: give one or as many"
            )
        return each

    def _begin(self, request_id: str, sequences: list[Request], *, stream: bool = False) -> None:
        with self._lock:
            self.engine.enqueue(request_id, sequences, stream=stream)
            if self._trace:
                self._trace.add(sequences)
            self._inbox[request_id] = []

    @contextmanager
    def _locked_in_turn(self) -> Iterator[None]:
        """Holds the lock, after all that have asked for it in this way before."""
        with ExitStack() as held:
            with self._turn:
                held.enter_context(self._lock)
            yield

    def _step(self) -> None:
        """Steps the engine and sorts its news."""
        try:
            news = self.engine.step()
        except BaseException:
            # Steps under way are lost, and with them the tokens of every request in them. Others
            # that wait for theirs find them ended.
            for output in self.engine.abort_all():
                self._inbox[output.request_id].append(output)
            raise
        for output in news:
            self._inbox[output.request_id].append(output)

    def _wait(self, request_id: str) -> list[RequestOutput]:
        """Steps the engine until there is news of a request, and takes it."""
        while True:
            with self._locked_in_turn():
                if news := self._inbox[request_id]:
                    self._inbox[request_id] = []
                    return news
                if not self.engine.has_request(request_id):
                    raise RuntimeError(f"request {request_id!r} has been aborted")
                self._step()

    def _run_until_done(self, waiting: set[str], interrupt: Interrupt, use_tqdm: bool) -> None:
        """Steps the engine until these requests have finished, or Ctrl-C is pressed."""
        with Progress(len(waiting), "Processed prompts", shown=use_tqdm) as bar:
            while waiting and not interrupt.pending:
                with self._locked_in_turn():
                    done = {request_id for request_id in waiting if self._inbox[request_id]}
                    waiting -= done
                    if waiting and not done:
                        self._step()
                bar.update(len(done))

    def _result(self, request_id: str) -> RequestOutput:
        """A request's output; one that has not finished is ended, and returned as it is."""
        with self._lock:
            output = self.engine.abort_request(request_id)
            return self._inbox[request_id][0] if output is None else output

    def _end(self, request_id: str) -> None:
        with self._lock:
            self.engine.abort_request(request_id)
            self._inbox.pop(request_id, None)
