"""From a fact to a sentence: voice, order, cleft, relative clause, reported speech, and the choice of words."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_mps.finetune.pairs.draws import Draws
from hf_mps.finetune.pairs.facts import Fact
from hf_mps.finetune.pairs.lexicon import NAMES
from hf_mps.finetune.pairs.relations import Wording
from hf_mps.finetune.pairs.words import gerund, mend_articles, participle, past, possessive, present

_AHEAD = {"planned": ("will", "is set to", "is to", "is going to"), "possible": ("may", "might", "could")}
_DECLINED = (
    "decided not to",
    "chose not to",
    "opted not to",
    "dropped plans to",
    "decided against",
    "abandoned plans to",
)
_BECAUSE = ("because of", "due to", "as a result of")
_TOLD = {
    "staff": ("employs {} people", "has {} employees", "has a workforce of {}"),
    "since": ("was founded in {}", "was established in {}", "dates from {}"),
    "seat": ("is based in {}", "has its headquarters in {}", "is headquartered in {}"),
    "age": ("is {} years old", "is {}", "is aged {}"),
    "home": ("comes from {}", "is from {}", "is a native of {}"),
}
_INSEPARABLE = frozenset(
    {"allow", "appoint", "beat", "bring", "drive", "find", "leave", "make", "name", "put", "send", "take"}
)
_LOOSE = frozenset({"against", "for", "from", "in", "over", "to"})
_PEOPLE = frozenset({"person", "politician"})


@dataclass
class Choices:
    """How to say it. A second sentence keeps each choice of the first with probability `keep`, else draws anew."""

    draws: Draws
    keep: float = 0.0
    first: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)

    def index(self, key: str, count: int) -> int:
        """Return the choice `key`: a number below `count`, the same each time that it is asked for."""
        if key not in self.made or self.made[key] >= count:
            kept = self.first.get(key, count)
            # Both are drawn always, so that one choice does not shift the others.
            keep, drawn = self.draws.chance(self.keep), self.draws.below(count)
            self.made[key] = kept if keep and kept < count else drawn
        return self.made[key]

    def one(self, key: str, options: tuple[str, ...]) -> str:
        """Return one of the options."""
        return options[self.index(key, len(options))]


def reserved(fact: Fact, place: int, passive: bool) -> bool:
    """Return whether this wording in this voice is held out for validation: about one of five is."""
    return (sum(map(ord, fact.group.name + fact.relation.name)) + 3 * place + passive) % 5 == 0


class _Sentence:
    """One rendering of a fact."""

    def __init__(self, fact: Fact, choices: Choices, held_out: bool) -> None:
        self.fact, self.choices, self.held_out = fact, choices, held_out
        self.words: dict[str, str] = {}
        for role, value in fact.values.items():
            form = choices.one(f"form {role}", value.forms)
            self.words[role] = form
            self.words[f"{role}'s"] = possessive(form)
            if value.modifiers:
                self.words[f"{role}-"] = choices.one(f"modifier {role}", value.modifiers)

    def phrase(self, template: str) -> tuple[str, bool]:
        """Return a noun phrase and whether it is plural."""
        bare = template.rstrip("+-") if template[-1] in "+-" else template
        if template.endswith("+"):
            plural = True
        elif template.endswith("-") or not bare.endswith("}"):
            plural = False
        else:
            plural = self.fact.values[bare[-2]].plural
        return bare.format_map(self.words), plural

    def wording(self) -> tuple[Wording, bool]:
        """Choose wording and voice among those that the standing and the split allow."""
        fact, options = self.fact, []
        for place, wording in enumerate(fact.relation.wordings):
            if fact.standing == "declined" and wording.subject != "{A}":
                continue
            for passive in (False, False, True):
                if passive and (not wording.object or fact.standing == "declined"):
                    continue
                if self.held_out or not reserved(fact, place, passive):
                    options.append((wording, passive))
        return options[self.choices.index("wording", len(options))]

    def verb(self, verb: str, plural: bool, passive: bool) -> str:
        """Return the finite verb as the standing has it."""
        standing, be = self.fact.standing, verb.startswith("be ")
        done = participle(verb)
        if standing in _AHEAD:
            auxiliary = self.choices.one(standing, _AHEAD[standing])
            if plural:
                auxiliary = auxiliary.replace("is ", "are ")
            return f"{auxiliary} {'be ' + done if passive else verb}"
        if standing == "declined":
            decision = self.choices.one(standing, _DECLINED)
            return f"{decision} {gerund(verb) if decision.endswith('against') else verb}"
        tense = present if "present" in standing else past
        negated = standing in ("denied", "not present")
        if passive or be or verb == "be":
            left = "be" if passive else verb
            right = f" {done}" if passive else ""
            finite = tense(left, plural)
            if negated:
                head, _, rest = finite.partition(" ")
                finite = f"{head} not {rest}".strip()
            return finite + right
        if negated:
            return f"{tense('do', plural) if tense is present else 'did'} not {verb}"
        return tense(verb, plural)

    def clause(self) -> tuple[str, str]:
        """Return the main clause and the role that it begins with, if it begins with a bare name."""
        wording, passive = self.wording()
        subject = wording.object if passive else wording.subject
        text, plural = self.phrase(subject)
        rest = wording.rest.lstrip("~").format_map(self.words)
        parts = [self.verb(wording.verb, plural, passive)]
        if passive:
            agent = "by " + self.phrase(wording.subject)[0]
            parts += [agent, rest] if self.agent_first(wording) else [rest, agent]
        else:
            parts += [self.phrase(wording.object)[0] if wording.object else "", rest]
        role = subject[1] if len(subject) == 3 else ""
        predicate = " ".join(filter(None, parts))
        people = bool(role) and self.fact.group.roles[role] in _PEOPLE
        if role and not passive and self.fact.group.roles[role] in NAMES and self.cleft():
            return f"it was {text} {'who' if people else 'that'} {predicate}", ""
        told = self.told(role)
        if told:
            text = f"{text}, {'who' if people else 'which'} {told},"
        return f"{text} {predicate}", role

    def agent_first(self, wording: Wording) -> bool:
        """Return whether `by …` stands before the rest: it must not part `found` from `guilty`."""
        if wording.rest.startswith("~"):
            return True
        if wording.verb.split()[0] in _INSEPARABLE or wording.rest.split(" ")[0] not in _LOOSE:
            return False
        return self.choices.index("agent", 2) == 0

    def cleft(self) -> bool:
        """Return whether to say `it was … that`: not behind a date or a reason, which takes its place in front."""
        return self.fact.standing == "done" and self.order() > 4 and self.choices.index("cleft", 4) == 0

    def order(self) -> int:
        """Return one of eight orders: three have the date in front, two the reason, the last the date in a cleft."""
        return self.choices.index("order", 8)

    def told(self, role: str) -> str:
        """Return what else is told of the one in this role."""
        detail = self.fact.detail
        if detail is None or detail.role != role:
            return ""
        # The first three forms: the fourth of a city is "the city of", which is one too many here.
        form = self.choices.one("told form", detail.value.forms[:3])
        return self.choices.one("told", _TOLD[detail.kind]).format(form)

    def when(self) -> str:
        if self.fact.date is None:
            return ""
        ahead = self.fact.standing in _AHEAD
        return self.choices.one("date", self.fact.date.later if ahead else self.fact.date.forms)

    def why(self) -> str:
        if self.fact.reason is None:
            return ""
        return f"{self.choices.one('because', _BECAUSE)} {self.choices.one('reason', self.fact.reason.forms)}"

    def text(self) -> str:
        """Return the whole sentence."""
        clause, role = self.clause()
        when, why = self.when(), self.why()
        order = self.order()
        front = when if order < 3 else why if order < 5 else ""
        sourced = self.fact.group.always_sourced or self.choices.index("sourced", 3) == 0
        style = self.choices.index("source style", 7) if sourced else -1
        if style in (0, 1, 2):
            front = ""
        behind = [part for part in (when, why) if part and part != front]
        body = f"{front}, {clause}" if front else clause
        if order == 7 and when and self.fact.standing == "done" and not clause.startswith("it was "):
            body, behind = f"it was {when} that {clause}", behind[1:]
        body = " ".join([body, *behind])
        if sourced:
            source = self.fact.source.format_map(self.words)
            body = _reported(body, source, style)
        sentences = [body]
        detail = self.fact.detail
        if detail and detail.role != role:
            sentences.append(f"{self.words[detail.role]} {self.told(detail.role)}")
        return " ".join(mend_articles(one[0].upper() + one[1:]) + "." for one in sentences)


def _reported(body: str, source: str, style: int) -> str:
    if style == 0:
        return f"according to {source}, {body}"
    if style < 3:
        return f"{source} said {'that ' if style == 1 else ''}{body}"
    if style < 5:
        return f"{body}, {source} said"
    return f"{body}, according to {source}"


def render(fact: Fact, choices: Choices, held_out: bool = False) -> str:
    """Return a sentence that says the fact, as the choices have it."""
    return _Sentence(fact, choices, held_out).text()
