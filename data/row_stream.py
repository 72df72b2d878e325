"""Rows of one data set -> prompt groups: parsed, those of the other split left out, those of one prompt merged.

Read as streams, twice: once for a 64-bit hash of every prompt, which shows what prompts repeat and which are held out,
and once for the rows themselves. So memory does not grow with the data, but for 8 bytes a row. A library for tables
would hold the rows, and would not know the line that a message should name.
"""

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice

from data.files import named
from data.format_detection import LABELS, SCORE_COLUMNS, Reading, detect_format, verdict
from data.ranked_rows import drop_small_gaps, rank_pairs
from data.row_formats import BAD_ROW, PromptGroup, parse_se, sft_group, with_input
from data.row_values import MESSAGE_FIELDS, is_empty
from data.splits import hold_out
from data.workers import ordered_map

MOST_NAMED = 3  # rows that cannot be read


class RowStream:
    """Rows -> groups.

    Args:
        name, split: of the data set. rows: where they come from (FileRows or HubRows of sources.py).
        parser, columns: of a named source, with the columns that it reads; None to go by the columns found.
        renames: canonical -> actual column names.
        test_share: the part of the prompts that is held out for testing, None where the test split is its own.
        by_row: see `hold_out`. workers: processes for the costly parser. reading: how rows are read.

    notices: what the user should see once, complete when all groups were read.
    """

    def __init__(self, name, split, rows, parser, columns, renames, test_share, by_row, workers, reading: Reading):
        self.name, self.split, self.rows, self.reading = name, split, rows, reading
        self.bad: list[str] = []  # the first rows that were left out, and why
        self.parser, self.columns, self.renames = parser, columns, renames
        self.test_share, self.by_row, self.workers = test_share, by_row, workers
        self.notices: list[str] = []
        self._named = parser is not None  # the other columns of a named data set are known, and mean nothing to it
        self._input: str | None = None  # a column that is appended to the prompt
        self._present: set[str] = set()  # all columns met
        self._labelled = False  # whether a label said good or bad
        self._contradicted: list[int] = []  # the first rows of prompts of which a response is called good and bad
        self._fields: set[str] = set()  # of the messages that were met, all that have a value

    def _detect(self):
        """Settles the parser and the columns to read, by the names of the columns."""
        found = self.rows.column_names()
        if found is None:
            raise ValueError(f"data set {self.name}: {self.rows.label()} is empty: no row to train on")
        names = self._present = set(found)
        missing = [actual for actual in self.renames.values() if actual not in names]
        if missing:
            raise ValueError(
                f"data set {self.name}: data.columns names {missing[0]!r}, but the columns of "
                f"{self.rows.label()} are {named(names)}"
            )
        if self.renames.get("prompt") == "instruction" and "input" in names - set(self.renames.values()):
            self._input = "input"
        if self.parser is None:
            canonical = (names - set(self.renames.values())) | set(self.renames)
            try:
                self.parser, self.columns = detect_format(canonical, self.reading)
            except ValueError as error:
                raise ValueError(f"data set {self.name} ({self.rows.label()}): {error}") from error
        elif not names & {self.renames.get(each, each) for each in self.columns}:
            raise ValueError(
                f"data set {self.name}: {self.rows.label()} has columns {named(names)}, but "
                f"{self.name} has {', '.join(self.columns)}; name yours with data.columns"
            )

    def _rows(self):
        """Yields (file or data set, number, row under its canonical column names)."""
        wanted = self._wanted()
        for where, number, row in self.rows.read(wanted):
            if not self._named and not isinstance(row, ValueError):
                self._note(row, wanted)
            yield where, number, self._renamed(row) if self.renames and not isinstance(row, ValueError) else row

    def _wanted(self) -> set[str]:
        """The columns to read, by their names in the data."""
        return {self.renames.get(each, each) for each in self.columns} | ({self._input} if self._input else set())

    def _note(self, row: dict, wanted):
        """Takes in what columns a row has, and what fields its messages have."""
        if not self._present.issuperset(row):
            self._present.update(row)
        self._labelled |= any(name in row and verdict(row[name]) is not None for name in LABELS)
        for name in wanted:
            for message in value if isinstance(value := row.get(name), list) else ():
                if isinstance(message, dict) and not self._fields.issuperset(message):
                    known = {"name"} if message.get("role") == "tool" else set()  # of the function
                    self._fields.update(name for name in message.keys() - known if not is_empty(message[name]))

    def _unread(self) -> Iterator[str]:
        """Notices of columns and fields that nothing reads."""
        if self._named or self.parser is parse_se:
            return
        without = {"responses": SCORE_COLUMNS, "pairs": LABELS, "unpaired": ()}[self.reading.kind]
        wanted = self._wanted() - {*without} - (set() if self._labelled else set(LABELS))
        for kind, names in (("columns", self._present - wanted), ("fields of messages", self._fields - MESSAGE_FIELDS)):
            if names:
                yield f"data set {self.name}: {kind} that are not read: {named(names)}"

    def findings(self, counts: Counter) -> list[str]:
        """Notices of what was found in the rows that were read so far."""
        found = list(self._unread())
        if self._contradicted:
            rows = ", ".join(map(str, self._contradicted))
            found.append(
                f"data set {self.name}: {counts['labelled_good_and_bad']:,} responses are called good by one row and "
                f"bad by another of the same prompt, and are an example of both; first of prompts in row {rows}"
            )
        if counts[BAD_ROW]:
            first = "; ".join(self.bad)
            found.append(
                f"data set {self.name}: {counts[BAD_ROW]:,} rows cannot be read and are left out; first: {first}"
            )
        return found

    def groups_as_they_come(self, counts: Counter) -> Iterator[PromptGroup]:
        """Yields the groups of all rows, read once: only rows of one prompt that follow each other are merged, and
        nothing is held out."""
        self._detect()
        last: PromptGroup | None = None
        for group in self._parsed():
            counts["rows"] += 1
            if isinstance(group, str):
                counts[group] += 1
                continue
            counts.update(group.dropped)
            if last is not None and last.key() == group.key() and not last.conflicts(group):
                last.merge(group)
                counts["merged_rows"] += 1
                continue
            if last is not None:
                counts["groups"] += 1
                yield from self._finished(last, counts)
            last = group
        if last is not None:
            counts["groups"] += 1
            yield from self._finished(last, counts)

    def _finished(self, whole: PromptGroup, counts: Counter) -> Iterator[PromptGroup]:
        """A group of which all rows are there, with its pairs, and those of earlier turns that SFT learns."""
        before = Counter(whole.dropped)
        if whole.ranked or (self.parser is parse_se and not self.reading.rule.is_default):
            rank_pairs(whole, self.reading.rule)
        else:
            drop_small_gaps(whole, self.reading.rule)
        counts.update(Counter(whole.dropped) - before)
        counts["groups"] += len(whole.earlier_turns)
        self._note_contradictions(whole, counts)
        yield whole
        for prompt, target in whole.earlier_turns:
            earlier = sft_group(prompt, target)
            assert isinstance(earlier, PromptGroup), "parse_messages leaves out blank ones"
            earlier.row, earlier.tools = whole.row, whole.tools
            yield earlier

    def _note_contradictions(self, group: PromptGroup, counts: Counter):
        """Count responses that labels call good and bad: each is an example of both."""
        good, bad = ({pair[side] for pair in group.pairs if pair[1 - side] < 0} for side in (0, 1))
        if both := len(good & bad):
            counts["labelled_good_and_bad"] += both
            if len(self._contradicted) < MOST_NAMED:
                self._contradicted.append(group.row)

    def _renamed(self, row: dict) -> dict | ValueError:
        taken = set(self.renames.values())
        renamed = {key: value for key, value in row.items() if key not in taken and key not in self.renames}
        for canonical, actual in self.renames.items():
            if actual not in row:
                return ValueError(f"column '{actual}' (data.columns.{canonical}) is missing; the row has {named(row)}")
            renamed[canonical] = row[actual]
        if self._input:
            try:
                renamed["prompt"] = with_input(renamed["prompt"], row.get(self._input))
            except ValueError as error:
                return error
        return renamed

    def _parsed(self):
        """Yields every row as PromptGroup, or the reason why it is dropped."""
        rows = self._rows()
        if self.parser is parse_se:  # HTML costs a hundred times what other rows do, so workers share it
            chunks = iter(lambda: list(islice(rows, 64)), [])
            parsed = ordered_map(_parse_rows, chunks, self.workers, self.parser)
        else:
            parsed = (_parse_rows(self.parser, [row]) for row in rows)
        for chunk in parsed:
            for where, number, group in chunk:
                if isinstance(group, ValueError):
                    problem = f"{self.rows.describe(where, number)}: {group}"
                    if not self.reading.skip_bad:
                        raise ValueError(f"{problem}. data.on_bad_row=skip leaves such rows out") from group
                    if len(self.bad) < MOST_NAMED:
                        self.bad.append(problem)
                    group = BAD_ROW
                yield group

    def _keys(self):
        """Yields a 64-bit number a row, equal for rows of the same prompt, 0 for rows that are certainly dropped."""
        if self.parser is parse_se:  # its HTML identifies a question as well as its text, which is costly to make
            for _, _, row in self._rows():
                yield 0 if isinstance(row, ValueError) else _hash(str(row.get("question")))
        else:
            for group in self._parsed():
                yield 0 if isinstance(group, str) else _hash(group.key())

    def groups(self, counts: Counter) -> Iterator[PromptGroup]:
        """Yields the split's groups and fills `counts`. Raises ValueError for a malformed row, naming its place."""
        self._detect()
        keys = array("Q", self._keys())
        belongs = hold_out(keys, self.split, self.test_share, self.by_row)
        waiting = _repeated(key for index, key in enumerate(keys) if belongs(index, key))
        merged: dict[int, dict[str, list[PromptGroup]]] = defaultdict(dict)
        seen, own_pairs = 0, False
        self.bad.clear()  # the second reading finds them again
        self._contradicted.clear()
        for index, group in enumerate(self._parsed()):
            seen += 1
            if seen > len(keys):
                break
            key = keys[index]
            if not belongs(index, key):
                continue
            counts["rows"] += 1
            same = merged[key] if key in waiting else {}  # by text below the number: a collision must not merge prompts
            if isinstance(group, str):
                counts[group] += 1
            else:
                counts.update(group.dropped)
                of_prompt = same.setdefault(group.key(), [])
                known = next((each for each in of_prompt if not each.conflicts(group)), None)
                if known is None:
                    of_prompt.append(group)
                else:
                    known.merge(group)
                    counts["merged_rows"] += 1
            if key in waiting:
                waiting[key] -= 1
                if waiting[key]:
                    continue
                del waiting[key], merged[key]
            wholes = [whole for of_prompt in same.values() for whole in of_prompt]
            counts["groups"] += len(wholes)
            for whole in wholes:
                own_pairs |= bool(whole.pairs) and not whole.ranked
                yield from self._finished(whole, counts)
        if self.reading.score in self._present:
            counts["rated_by_data_score"] = counts["rows"]
        if seen != len(keys):
            raise ValueError(f"data set {self.name}: {self.rows.label()} changed while it was read")
        self.notices += [text for text in self.findings(counts) if text not in self.notices]
        if own_pairs and self.reading.rule.how != "all":
            self.notices.append(
                f"data set {self.name}: data.pairs={self.reading.rule.how} is for rankings; pairs that rows name "
                "themselves stay as they are"
            )
        assert not merged, "every row of a repeated prompt was seen"
        if not counts["rows"] and self.split == "train":
            raise ValueError(
                f"data set {self.name}: no row is left to train on ({len(keys)} rows, held-out share "
                f"{self.test_share}); give more data, a test file, or a smaller data.test_fraction"
            )


def _parse_rows(parser, rows) -> list:
    """[(where, number, PromptGroup | reason | ValueError)] of rows [(where, number, row)]; runs in workers too."""
    done = []
    for where, number, row in rows:
        try:
            group = row if isinstance(row, ValueError) else parser(row)
            if isinstance(group, PromptGroup):
                group.row = number
        except ValueError as error:
            group = ValueError(str(error))
        done.append((where, number, group))
    return done


def _hash(text: str) -> int:
    """A stable 64-bit hash above 0."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") or 1


def _repeated(keys) -> dict[int, int]:
    """key -> number of rows, for the keys above 0 that occur more than once."""
    import numpy as np

    numbers, occurrences = np.unique(np.frombuffer(array("Q", keys), np.uint64), return_counts=True)
    many = (occurrences > 1) & (numbers > 0)
    return dict(zip(numbers[many].tolist(), occurrences[many].tolist()))
