"""Weather, science, cities and events: what happens there, and the ways to say it."""

from __future__ import annotations

from hf_mps.finetune.pairs.relations import EVENT, GENERAL, PLAN, Group, relation

WEATHER_SOURCES = ("officials", "forecasters", "emergency services")

STORM = Group(
    "storm",
    {"A": "storm", "P": "city", "Q": "city"},
    (
        relation(
            "hit",
            """{A} | hit | {P} | ~on its way to {Q}
            {A} | strike | {P} | ~on its way to {Q}
            {A} | batter | {P} | ~on its path to {Q}
            {A} | slam into | | {P} on the way to {Q}
            {P} | be hit | | by {A} on its way to {Q}""",
        ),
        relation(
            "miss",
            """{A} | miss | {P} | ~on its way to {Q}
            {A} | spare | {P} | ~on its way to {Q}
            {A} | bypass | {P} | ~on its path to {Q}
            {A} | pass by | | {P} on the way to {Q}
            {P} | be spared | | by {A} on its way to {Q}""",
        ),
    ),
    (("done", 1.0),),
    ("PQ",),
    WEATHER_SOURCES,
)

OUTAGE = Group(
    "outage",
    {"A": "storm", "N": "count", "P": "city"},
    (
        relation(
            "cut",
            """{A} | cut off | power | to {N} homes in {P}
            {A} | knock out | power | to {N} homes in {P}
            {A} | leave | {N} homes in {P}+ | without power
            {A} | leave | {N} homes in {P}+ | in the dark
            {N} homes in {P}+ | lose | | power because of {A}
            {N} homes in {P}+ | be | | without electricity because of {A}""",
        ),
        relation(
            "restore",
            """crews+ | restore | power | ~to {N} homes in {P} after {A}
            crews+ | bring back | power | ~to {N} homes in {P} after {A}
            crews+ | reconnect | {N} homes in {P}+ | ~after {A}
            crews+ | return | power | ~to {N} homes in {P} after {A}
            {N} homes in {P}+ | regain | | power after {A}
            {N} homes in {P}+ | have | | electricity again after {A}""",
        ),
    ),
    (("done", 0.75), ("possible", 0.25)),
    (),
    WEATHER_SOURCES,
)

TEMPERATURE = Group(
    "temperature",
    {"P": "city", "N": "degrees"},
    (
        relation(
            "rise",
            """temperatures in {P}+ | rise | | to {N}
            temperatures in {P}+ | climb | | to {N}
            temperatures in {P}+ | go up | | to {N}
            the temperature in {P}- | increase | | to {N}
            {P} | warm up | | to {N}
            {P} | see | | temperatures rise to {N}""",
        ),
        relation(
            "fall",
            """temperatures in {P}+ | fall | | to {N}
            temperatures in {P}+ | drop | | to {N}
            temperatures in {P}+ | go down | | to {N}
            the temperature in {P}- | decrease | | to {N}
            {P} | cool down | | to {N}
            {P} | see | | temperatures fall to {N}""",
        ),
    ),
    PLAN,
    (),
    ("forecasters", "the weather service", "meteorologists"),
)

EVACUATION = Group(
    "evacuation",
    {"N": "staff count", "P": "city", "X": "hazard"},
    (
        relation(
            "leave",
            """{X} | force | {N} residents of {P}+ | from their homes
            {X} | drive | {N} people in {P}+ | from their homes
            {N} people in {P}+ | leave | | their homes because of {X}
            {N} residents of {P}+ | have to leave | | their homes because of {X}
            officials+ | evacuate | {N} residents of {P}+ | ~because of {X}""",
        ),
        relation(
            "return",
            """officials+ | allow | {N} residents of {P}+ | ~back into their homes after {X}
            officials+ | bring | {N} people in {P}+ | ~back to their homes after {X}
            {N} people in {P}+ | return | | to their homes after {X}
            {N} residents of {P}+ | be able to return to | | their homes after {X}
            officials+ | bring back | {N} residents of {P}+ | ~after {X}""",
        ),
    ),
    (("done", 0.7), ("possible", 0.3)),
    (),
    ("police", "local media", "emergency services"),
)

CLOSURE = Group(
    "closure",
    {"P": "city", "X": "link", "Y": "weather"},
    (
        relation(
            "close",
            """the {P-} {X}- | close | | because of {Y}
            the {X} in {P}- | shut | | because of {Y}
            {Y}- | close | | the {X} in {P} to traffic
            {Y}- | shut down | the {P-} {X}-
            officials+ | close | the {X} in {P}- | ~because of {Y}""",
        ),
        relation(
            "reopen",
            """the {P-} {X}- | reopen | | despite {Y}
            the {X} in {P}- | open again | | despite {Y}
            officials+ | reopen | | the {X} in {P} to traffic despite {Y}
            officials+ | open up | the {P-} {X}- | ~despite {Y}
            officials+ | reopen | the {X} in {P}- | ~despite {Y}""",
        ),
    ),
    (("done", 0.75), ("possible", 0.25)),
    (),
    ("police", "local media", "travelers"),
)

HEALTH = Group(
    "health",
    {"X": "habit", "Y": "disease", "N": "percent", "U": "university"},
    (
        relation(
            "lower",
            """{X}- | lower | the risk of {Y} | by {N}
            {X}- | reduce | the risk of {Y} | by {N}
            {X}- | cut | the danger of {Y} | by {N}
            {X}- | make | | {Y} {N} less likely
            the risk of {Y}- | fall | | by {N} with {X}""",
        ),
        relation(
            "raise",
            """{X}- | raise | the risk of {Y} | by {N}
            {X}- | increase | the risk of {Y} | by {N}
            {X}- | raise | the danger of {Y} | by {N}
            {X}- | make | | {Y} {N} more likely
            the risk of {Y}- | rise | | by {N} with {X}""",
        ),
    ),
    (("present", 0.75), ("possible", 0.25)),
    (),
    ("researchers at {U}", "scientists at {U}", "a study at {U}"),
    always_sourced=True,
    dated=False,
)

CAUSE = Group(
    "cause",
    {"A": "event", "B": "event", "P": "city"},
    (
        relation(
            "cause",
            """{A} | cause | {B} | ~in {P}
            {A} | lead | | to {B} in {P}
            {A} | trigger | {B} | ~in {P}
            {A} | bring about | {B} | ~in {P}
            {B} | result | | from {A} in {P}
            {B} | happen | | because of {A} in {P}
            {B} | be | | the result of {A} in {P}""",
        ),
    ),
    EVENT,
    ("AB",),
)

ORDER = Group(
    "order",
    {"A": "event", "B": "event", "P": "city"},
    (
        relation(
            "before",
            """{A} | come | | before {B} in {P}
            {A} | precede | {B} | ~in {P}
            {A} | begin | | earlier than {B} in {P}
            {B} | come | | after {A} in {P}
            {B} | follow | {A} | ~in {P}
            {B} | begin | | later than {A} in {P}""",
        ),
    ),
    (("done", 1.0),),
    ("AB",),
    dated=False,
)

SIZE = Group(
    "size",
    {"P": "city", "Q": "city"},
    (
        relation(
            "larger",
            """{P} | be | | larger than {Q}
            {P} | be | | bigger than {Q}
            {P} | have | | more residents than {Q}
            {P} | have | | a larger population than {Q}
            {Q} | be | | smaller than {P}
            {Q} | have | | fewer residents than {P}
            {Q} | have | | a smaller population than {P}""",
        ),
        relation(
            "dearer",
            """homes in {P}+ | be | | more expensive than homes in {Q}
            homes in {P}+ | cost | | more than homes in {Q}
            {P} | have | | more expensive homes than {Q}
            {P} | have | | higher home prices than {Q}
            homes in {Q}+ | be | | cheaper than homes in {P}
            homes in {Q}+ | cost | | less than homes in {P}
            {Q} | have | | lower home prices than {P}""",
        ),
    ),
    GENERAL,
    ("PQ",),
    ("official figures", "a new report"),
    dated=False,
)

GROUPS = (STORM, OUTAGE, TEMPERATURE, EVACUATION, CLOSURE, HEALTH, CAUSE, ORDER, SIZE)
