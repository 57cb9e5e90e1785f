"""From tokens to what callers see: text, stop strings, and the sequences of one request joined."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyvllm.engine.detokenizer import Detokenizer
from tinyvllm.engine.request import Request
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True)
class _Sequence:
    """One of a request's n sequences and its text."""

    request: Request
    detokenizer: Detokenizer | None  # None where nobody wants text
    num_pushed: int = 0  # output tokens that the detokenizer has
    # What the caller of a stream has: so many characters and tokens, and the end.
    num_reported_chars: int = 0
    num_reported_tokens: int = 0
    end_reported: bool = False


@dataclass(slots=True)
class _Group:
    """A request as its caller knows it."""

    request_id: str
    prompt_token_ids: list[int]  # the caller's copy
    stream: bool
    sequences: list[_Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(s.request.finished for s in self.sequences)


class OutputProcessor:
    """Follows requests from `add` to their last output.

    Text is made token by token only where somebody needs it so: for requests that stream and for
    those with stop strings. All others are decoded once, at their end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._members: dict[str, tuple[_Group, _Sequence]] = {}  # by the sequences' ids
        # Sequences that are looked at after every token: for their caller, for a stop string.
        self._streaming: set[str] = set()
        self._stopping: set[str] = set()

    def add(self, request_id: str, requests: list[Request], stream: bool) -> None:
        """Begins a request that consists of these sequences."""
        group = _Group(request_id, list(requests[0].prompt_token_ids), stream)
        for request in requests:
            text = None
            if request.params.detokenize:
                text = Detokenizer(self._tokenizer, request.prompt_token_ids, request.params)
            sequence = _Sequence(request, text)
            group.sequences.append(sequence)
            self._members[request.request_id] = group, sequence
            if stream:
                self._streaming.add(request.request_id)
            if request.params.stop:
                self._stopping.add(request.request_id)
        self._groups[request_id] = group

    @property
    def request_ids(self) -> list[str]:
        """The requests that are not reported finished."""
        return list(self._groups)

    def sequences(self, request_id: str) -> list[Request]:
        """The sequences of a request; none if it is unknown or has been reported finished."""
        group = self._groups.get(request_id)
        return [s.request for s in group.sequences] if group else []

    def remove(self, request_id: str) -> RequestOutput | None:
        """Forgets a request and returns it as far as it has come; None if it is unknown."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        for sequence in group.sequences:
            del self._members[sequence.request.request_id]
            self._streaming.discard(sequence.request.request_id)
            self._stopping.discard(sequence.request.request_id)
        left = [sequence for sequence in group.sequences if not sequence.end_reported]
        return self._report(group, left, group.finished)

    def find_stops(self, requests: list[Request]) -> list[tuple[Request, str]]:
        """Adds new tokens to the text of requests with stop strings; returns those whose text now
        holds one, with the string."""
        stopped = []
        for request in requests if self._stopping else ():
            if request.request_id in self._stopping:
                _, sequence = self._members[request.request_id]
                detokenizer = sequence.detokenizer
                assert detokenizer is not None, f"{request} has stop strings and no text"
                _push(sequence, detokenizer)
                if detokenizer.stop_reason is not None:
                    stopped.append((request, detokenizer.stop_reason))
        return stopped

    def outputs(self, touched: list[Request], ended: list[Request]) -> list[RequestOutput]:
        """What to report after a step that gave a token to the sequences `touched`, of which
        those in `ended` (and perhaps others) have ended.

        A request that streams is reported each time, with the new text of one sequence, at its end
        of all that end with it; any other once, when all its sequences have ended.
        """
        reports = []
        streaming, stopping = self._streaming, self._stopping
        for request in touched if streaming or stopping else ():
            if request.request_id in streaming:
                # Nothing is there if it was aborted meanwhile, or reported with another's end.
                member = self._members.get(request.request_id)
                if member is not None and not member[1].end_reported:
                    reports.append(self._report_stream(*member))
            elif request.finished and request.request_id in stopping:
                reports += self._report_end(request)
        for request in ended:
            if request.request_id not in streaming and request.request_id not in stopping:
                reports += self._report_end(request)
        return reports

    def _report_stream(self, group: _Group, sequence: _Sequence) -> RequestOutput:
        """What is new of one sequence, or at the end of its request of all."""
        if sequence.request.finished and group.finished:
            last = self.remove(group.request_id)
            assert last is not None
            return last
        return self._report(group, [sequence], False)

    def _report_end(self, request: Request) -> list[RequestOutput]:
        """The whole request that a sequence belongs to, if that was its last one."""
        member = self._members.get(request.request_id)
        if member is None or not member[0].finished:
            return []
        last = self.remove(member[0].request_id)
        return [] if last is None else [last]

    def _report(self, group: _Group, sequences: list[_Sequence], finished: bool) -> RequestOutput:
        first = group.sequences[0].request
        scored = first.params.prompt_logprobs is not None
        return RequestOutput(
            group.request_id,
            first.prompt,
            group.prompt_token_ids,
            list(first.prompt_logprobs) if scored else None,
            [_completion(sequence, group.stream) for sequence in sequences],
            finished,
            first.num_cached_tokens,
        )


def _push(sequence: _Sequence, detokenizer: Detokenizer) -> None:
    """Decodes the tokens that are new."""
    request = sequence.request
    new = request.output_token_ids[sequence.num_pushed :]
    sequence.num_pushed += len(new)
    if new or request.finished:
        detokenizer.push(new, request.finish_reason)


def _completion(sequence: _Sequence, delta: bool) -> CompletionOutput:
    """A sequence's output so far; with `delta` only what was not reported before."""
    request, text = sequence.request, ""
    token_ids = request.output_token_ids
    if sequence.detokenizer is not None:
        _push(sequence, sequence.detokenizer)
        text = sequence.detokenizer.text_from(sequence.num_reported_chars)
    logprobs = request.logprobs if request.params.logprobs is not None else None
    cumulative_logprob = None if logprobs is None else request.cumulative_logprob
    if delta:
        start = sequence.num_reported_tokens
        sequence.num_reported_tokens = len(token_ids)
        sequence.num_reported_chars += len(text)
        sequence.end_reported = request.finished
        token_ids = token_ids[start:]
        logprobs = None if logprobs is None else logprobs[start:]
    return CompletionOutput(
        request.index,
        text,
        token_ids,
        cumulative_logprob,
        logprobs,
        request.finish_reason,
        request.stop_reason,
    )
