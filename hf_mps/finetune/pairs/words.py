"""English at the level of a word: verb forms, numbers in words, possessives, a or an."""

from __future__ import annotations

import re


def words(text: str) -> list[str]:
    """Return the words of a list written as text."""
    return text.split()


# base: (past, participle); a regular verb needs no entry.
_IRREGULAR = {
    "beat": ("beat", "beaten"),
    "begin": ("began", "begun"),
    "break": ("broke", "broken"),
    "bring": ("brought", "brought"),
    "buy": ("bought", "bought"),
    "come": ("came", "come"),
    "cost": ("cost", "cost"),
    "cut": ("cut", "cut"),
    "drive": ("drove", "driven"),
    "fall": ("fell", "fallen"),
    "find": ("found", "found"),
    "get": ("got", "got"),
    "give": ("gave", "given"),
    "go": ("went", "gone"),
    "grow": ("grew", "grown"),
    "have": ("had", "had"),
    "hit": ("hit", "hit"),
    "lay": ("laid", "laid"),
    "lead": ("led", "led"),
    "leave": ("left", "left"),
    "lend": ("lent", "lent"),
    "lose": ("lost", "lost"),
    "make": ("made", "made"),
    "overcome": ("overcame", "overcome"),
    "meet": ("met", "met"),
    "outsell": ("outsold", "outsold"),
    "pay": ("paid", "paid"),
    "put": ("put", "put"),
    "rise": ("rose", "risen"),
    "see": ("saw", "seen"),
    "seek": ("sought", "sought"),
    "sell": ("sold", "sold"),
    "send": ("sent", "sent"),
    "shed": ("shed", "shed"),
    "shoot": ("shot", "shot"),
    "shut": ("shut", "shut"),
    "strike": ("struck", "struck"),
    "take": ("took", "taken"),
    "throw": ("threw", "thrown"),
    "win": ("won", "won"),
    "withdraw": ("withdrew", "withdrawn"),
}
_DOUBLED = frozenset(words("acquit begin cut drop get hit net put scrap shed shut slam stop win"))
_ONES = words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen"""
)
_TENS = words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")


def _head(verb: str) -> tuple[str, str]:
    head, space, rest = verb.partition(" ")
    return head, space + rest


def past(verb: str, plural: bool) -> str:
    """Return the past tense of a verb, which may carry words after it: `take over` gives `took over`."""
    head, rest = _head(verb)
    if head == "be":
        return ("were" if plural else "was") + rest
    return (_IRREGULAR[head][0] if head in _IRREGULAR else _regular_past(head)) + rest


def participle(verb: str) -> str:
    """Return the past participle of a verb."""
    head, rest = _head(verb)
    return (_IRREGULAR[head][1] if head in _IRREGULAR else _regular_past(head)) + rest


def present(verb: str, plural: bool) -> str:
    """Return the present tense, third person."""
    head, rest = _head(verb)
    if head == "be":
        return ("are" if plural else "is") + rest
    if plural:
        return verb
    if head == "have":
        return "has" + rest
    if re.search(r"(s|x|z|ch|sh|o)$", head):
        return head + "es" + rest
    if re.search(r"[^aeiou]y$", head):
        return head[:-1] + "ies" + rest
    return head + "s" + rest


def gerund(verb: str) -> str:
    """Return the -ing form."""
    head, rest = _head(verb)
    if head in _DOUBLED:
        return head + head[-1] + "ing" + rest
    if head.endswith("e") and not head.endswith("ee") and head != "be":
        return head[:-1] + "ing" + rest
    return head + "ing" + rest


def _regular_past(head: str) -> str:
    if head.endswith("e"):
        return head + "d"
    if re.search(r"[^aeiou]y$", head):
        return head[:-1] + "ied"
    return head + (head[-1] if head in _DOUBLED else "") + "ed"


def in_words(number: int) -> str:
    """Return a whole number from 0 to 99 in words."""
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def possessive(name: str) -> str:
    """Return the possessive of a name: `Foods'`, `Denver's`."""
    return name + ("'" if name.endswith("s") else "'s")


_ARTICLE = re.compile(r"\b([Aa])n? (?=(\$?)([\w.,-]+))")
_VOWEL_SOUND = re.compile(r"(?!uni|use|usu|euro|one\b|u\.)[aeiou]|hour|heir|honest|8|1[18](?!\d)", re.IGNORECASE)


def mend_articles(text: str) -> str:
    """Return the text with each `a` or `an` as the sound of the next word has it: an 8-year term, a university."""

    def mend(found: re.Match[str]) -> str:
        return found.group(1) + ("n " if _VOWEL_SOUND.match(found.group(3)) else " ")

    return _ARTICLE.sub(mend, text)


def tokens(text: str) -> list[str]:
    """Return the words of a sentence in lower case; a figure such as 1,200 or 3-1 is one word."""
    return re.findall(r"[a-z]+|\d[\d.,-]*\d|\d", text.lower())
