"""The text of one generated sequence: what may be shown so far, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from tinyvllm.model.tokenizer import IncrementalDecoder, Tokenizer
from tinyvllm.sampling_params import SamplingParams


class Detokenizer:
    """Turns the tokens of one sequence into text as they come, or all at once at the end.

    How the tokens are cut into pushes changes neither the text nor where it stops: with stop
    strings every token is looked at by itself. Without them many tokens cost little more than one.

    stop_reason: the stop string that was found. The text is final then; further tokens are ignored.
    num_tokens: tokens taken in; the last of them completed the stop string, if one was found.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._params = params
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids, params.skip_special_tokens)
        self._decoded = ""
        self._num_shown = 0  # characters of it; the others may be the beginning of a stop string

    @property
    def text(self) -> str:
        """All deltas joined; after the end, the sequence's whole text."""
        return self.text_from(0)

    def text_from(self, start: int) -> str:
        """The same from a character on."""
        return self._decoded[start : self._num_shown]

    def push(self, token_ids: Sequence[int], finish_reason: str | None = None) -> str:
        """The new text that no later token can take back; with a finish reason, all the rest.

        With the finish reason "stop" the last token is what ended the sequence; its text is shown
        only with `include_stop_str_in_output`.
        """
        params = self._params
        if self.stop_reason is not None or not params.detokenize:
            return ""
        hides_last = finish_reason == "stop" and not params.include_stop_str_in_output
        visible = token_ids[:-1] if hides_last else token_ids
        if params.stop:
            for token in visible:
                if self._push_checked(token):
                    break
        else:
            self._decoded += self._decoder.push(visible)
            self.num_tokens += len(visible)
        if self.stop_reason is None and finish_reason is not None:
            self._decoded += self._decoder.flush()
            self.num_tokens += len(token_ids) - len(visible)
        final = self.stop_reason is not None or finish_reason is not None
        end = len(self._decoded) - (0 if final else self._num_held())
        delta = self._decoded[self._num_shown : end]
        self._num_shown = end
        return delta

    def _push_checked(self, token: int) -> bool:
        """Takes one token in; True, and the text cut, if a stop string ends in it."""
        before = len(self._decoded)
        self._decoded += self._decoder.push([token])
        self.num_tokens += 1
        if len(self._decoded) == before or self.num_tokens <= self._params.min_tokens:
            return False
        for stop in self._params.stop:
            start = self._decoded.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                end = start + len(stop) if self._params.include_stop_str_in_output else start
                self._decoded = self._decoded[:end]
                self.stop_reason = stop
                return True
        return False

    def _num_held(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        if self._params.include_stop_str_in_output:
            return 0
        text, longest = self._decoded, 0
        for stop in self._params.stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(text) - start)
        return longest
