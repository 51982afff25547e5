"""Amounts and dates, each with the forms in which a newspaper writes it."""

from __future__ import annotations

from hf_mps.finetune.pairs.draws import Draws
from hf_mps.finetune.pairs.lexicon import Value
from hf_mps.finetune.pairs.words import in_words, words

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
_FRACTIONS = {10: "a tenth", 20: "a fifth", 25: "a quarter", 33: "a third", 50: "half", 75: "three quarters"}
_SMALL_EXTRA = {12: "a dozen", 24: "two dozen", 36: "three dozen"}


def _dollars(draws: Draws, largest: str = "billion") -> Value:
    tenths = draws.below(98) + 11
    size = largest if draws.chance(0.4) else "million"
    whole, tenth = divmod(tenths, 10)
    figure = f"{whole}.{tenth}" if tenth else str(whole)
    forms = [f"${figure} {size}", f"{figure} {size} dollars"]
    if size == "million":
        forms.append(f"${tenths * 100_000:,}")
    return Value(f"{figure} {size}", tuple(forms), modifiers=(f"${figure} {size}", f"{figure} {size} dollar"))


def _percent(draws: Draws) -> Value:
    number = draws.pick((*range(3, 50), *_FRACTIONS, *_FRACTIONS))
    forms = [f"{number} percent", f"{number}%", f"{in_words(number)} percent"]
    if number in _FRACTIONS:
        forms += [_FRACTIONS[number]] * 2
    return Value(str(number), tuple(forms), plural=True)


def _few(draws: Draws) -> Value:
    number = draws.below(8) + 2
    return Value(str(number), (str(number), in_words(number)), plural=True)


def _millions(draws: Draws) -> Value:
    return _dollars(draws, largest="million")


def _people(draws: Draws) -> Value:
    return _count(draws, draws.below(4))


def _staff_count(draws: Draws) -> Value:
    return _count(draws, draws.below(3))


def _count(draws: Draws, size: int) -> Value:
    if size == 0:
        number = draws.pick((*range(11, 60), *_SMALL_EXTRA, *_SMALL_EXTRA))
        extra = (_SMALL_EXTRA[number],) if number in _SMALL_EXTRA else ()
        return Value(str(number), (str(number), in_words(number), *extra), plural=True)
    if size == 1:
        hundreds = draws.below(8) + 2
        return Value(f"{hundreds}00", (f"{hundreds}00", f"{in_words(hundreds)} hundred"), plural=True)
    if size == 2:
        thousands = draws.below(48) + 2
        return Value(f"{thousands},000", (f"{thousands},000", f"{in_words(thousands)} thousand"), plural=True)
    tenths = draws.below(38) + 11
    figure = f"{tenths // 10}.{tenths % 10}" if tenths % 10 else str(tenths // 10)
    return Value(f"{figure} million", (f"{figure} million", f"{tenths * 100_000:,}"), plural=True)


def _staff(draws: Draws) -> Value:
    hundreds = draws.below(85) + 6
    exact = f"{hundreds * 100:,}"
    if hundreds % 10:
        return Value(exact, (exact,), plural=True)
    return Value(exact, (exact, f"{in_words(hundreds // 10)} thousand"), plural=True)


def _years(draws: Draws) -> Value:
    number = draws.below(19) + 2
    forms = (f"{number} years", f"{in_words(number)} years")
    return Value(str(number), forms, plural=True, modifiers=(f"{number}-year", f"{in_words(number)}-year"))


def _score(draws: Draws) -> Value:
    low = draws.below(4)
    high = low + draws.below(4) + 1
    return Value(
        f"{high}-{low}",
        (f"{high}-{low}", f"{high} to {low}", f"{in_words(high)} to {in_words(low)}"),
        modifiers=(f"{high}-{low}",),
    )


def _degrees(draws: Draws) -> Value:
    number = draws.below(36) + 4
    return Value(str(number), (f"{number} degrees", f"{in_words(number)} degrees", f"{number} degrees Celsius"))


def _age(draws: Draws) -> Value:
    number = draws.below(50) + 21
    return Value(str(number), (str(number),))


def _since(draws: Draws) -> Value:
    number = draws.below(90) + 1920
    return Value(str(number), (str(number),))


_MAKERS = {
    "dollars": _dollars,
    "percent": _percent,
    "few": _few,
    "millions": _millions,
    "count": _people,
    "staff count": _staff_count,
    "staff": _staff,
    "years": _years,
    "score": _score,
    "degrees": _degrees,
    "age": _age,
    "since": _since,
}
AMOUNTS = frozenset(_MAKERS)


def amount(kind: str, draws: Draws) -> Value:
    """Draw an amount of a kind in AMOUNTS."""
    return _MAKERS[kind](draws)


def date(draws: Draws) -> Value:
    """Draw a day of the week or a month; `forms` look back, `later` look ahead."""
    if draws.chance(0.6):
        day = draws.pick(DAYS)
        return Value(day, (f"on {day}", f"last {day}", f"on {day}"), later=(f"on {day}", f"next {day}"))
    month = draws.pick(MONTHS)
    return Value(month, (f"in {month}", f"last {month}", f"during {month}"), later=(f"in {month}", f"next {month}"))
