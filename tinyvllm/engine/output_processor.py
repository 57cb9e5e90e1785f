"""From tokens to what callers see: text, stop strings, and the sequences of one request joined."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinyvllm.engine.detokenizer import Detokenizer
from tinyvllm.engine.request import Request
from tinyvllm.model.tokenizer import Tokenizer
from tinyvllm.outputs import CompletionOutput, RequestOutput


@dataclass
class _Sequence:
    """One of a request's n sequences and its text."""

    request: Request
    detokenizer: Detokenizer
    num_pushed: int = 0  # output tokens that the detokenizer has
    # What the caller of a stream has: so many characters and tokens, and the end.
    reported: tuple[int, int] = (0, 0)
    end_reported: bool = False


@dataclass
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
        self._eager: set[str] = set()  # sequences whose text is needed token by token

    def add(self, request_id: str, requests: list[Request], stream: bool) -> None:
        """Begins a request that consists of these sequences."""
        group = _Group(request_id, list(requests[0].prompt_token_ids), stream)
        for request in requests:
            text = Detokenizer(self._tokenizer, request.prompt_token_ids, request.params)
            sequence = _Sequence(request, text)
            group.sequences.append(sequence)
            self._members[request.request_id] = group, sequence
            if stream or request.params.stop:
                self._eager.add(request.request_id)
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
            self._eager.discard(sequence.request.request_id)
        return self._report(group, group.sequences)

    def find_stops(self, requests: list[Request]) -> list[tuple[Request, str]]:
        """Adds new tokens to the text of requests that need it so; returns those whose text now
        holds a stop string, with the string."""
        stopped = []
        for request in requests if self._eager else ():
            if request.request_id in self._eager:
                _, sequence = self._members[request.request_id]
                _push(sequence)
                if sequence.detokenizer.stop_reason is not None:
                    stopped.append((request, sequence.detokenizer.stop_reason))
        return stopped

    def outputs(self, touched: list[Request], ended: list[Request]) -> list[RequestOutput]:
        """What to report after a step that gave a token to the sequences `touched`, of which
        those in `ended` (and perhaps others) have ended.

        A request that streams is reported each time, with the new text of one sequence, at its end
        of all that end with it; any other once, when all its sequences have ended.
        """
        eager = [r for r in touched if r.request_id in self._eager] if self._eager else []
        reports = []
        for request in eager + [r for r in ended if r.request_id not in self._eager]:
            member = self._members.get(request.request_id)
            if member is None:
                continue  # aborted meanwhile, or reported with another that ended
            group, sequence = member
            if group.finished:
                last = self.remove(group.request_id)
                assert last is not None
                reports.append(last)
            elif group.stream and not sequence.end_reported:
                reports.append(self._report(group, [sequence]))
        return reports

    def _report(self, group: _Group, sequences: list[_Sequence]) -> RequestOutput:
        first = group.sequences[0].request
        scored = first.params.prompt_logprobs is not None
        return RequestOutput(
            group.request_id,
            first.prompt,
            group.prompt_token_ids,
            list(first.prompt_logprobs) if scored else None,
            [_completion(s, delta=group.stream) for s in sequences if not s.end_reported],
            group.finished,
            first.num_cached_tokens,
        )


def _push(sequence: _Sequence) -> None:
    """Decodes the tokens that are new."""
    request = sequence.request
    new = request.output_token_ids[sequence.num_pushed :]
    sequence.num_pushed += len(new)
    if new or request.finished:
        sequence.detokenizer.push(new, request.finish_reason)


def _completion(sequence: _Sequence, delta: bool) -> CompletionOutput:
    """A sequence's output so far; with `delta` only what was not reported before."""
    _push(sequence)
    request, text = sequence.request, sequence.detokenizer.text
    first_char, first_token = sequence.reported if delta else (0, 0)
    sequence.reported = len(text), len(request.output_token_ids)
    sequence.end_reported = delta and request.finished
    with_logprobs = request.params.logprobs is not None
    return CompletionOutput(
        index=request.index,
        text=text[first_char:],
        token_ids=request.output_token_ids[first_token:],
        cumulative_logprob=request.cumulative_logprob if with_logprobs else None,
        logprobs=request.logprobs[first_token:] if with_logprobs else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )
