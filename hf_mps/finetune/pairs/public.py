"""Courts, weather, science and politics: what happens there, and the ways to say it."""

from __future__ import annotations

from hf_mps.finetune.pairs.relations import EVENT, GENERAL, PLAN, Group, relation

COURT_SOURCES = ("court officials", "prosecutors", "lawyers")
WEATHER_SOURCES = ("officials", "forecasters", "emergency services")
DETAIL = frozenset({"detail"})

VERDICT = Group(
    "verdict",
    {"A": "person", "X": "crime", "P": "city"},
    (
        relation(
            "convict",
            """a jury in {P}- | convict | {A} | of {X}
            a {P} jury- | find | {A} | guilty of {X}
            a court in {P}- | find | {A} | guilty of {X}
            a {P} court- | convict | {A} | of {X}
            {A} | lose | | a {X} case in a {P} court""",
        ),
        relation(
            "acquit",
            """a jury in {P}- | acquit | {A} | of {X}
            a {P} jury- | find | {A} | not guilty of {X}
            a court in {P}- | find | {A} | innocent of {X}
            a {P} court- | clear | {A} | of {X}
            {A} | win | | a {X} case in a {P} court""",
        ),
    ),
    (("done", 0.8), ("possible", 0.2)),
    (),
    COURT_SOURCES,
    extras=DETAIL,
)

SENTENCE = Group(
    "sentence",
    {"A": "person", "N": "years", "X": "crime", "P": "city"},
    (
        relation(
            "jail",
            """a judge in {P}- | sentence | {A} | to {N} in prison for {X}
            a {P} judge- | send | {A} | to prison for {N} for {X}
            a court in {P}- | jail | {A} | for {N} for {X}
            {A} | get | | {N} in prison for {X} in {P}
            {A} | receive | | a {N-} prison term for {X} in {P}
            {A} | go | | to prison for {N} for {X} in {P}""",
        ),
        relation(
            "free",
            """a judge in {P}- | free | {A} | after {N} in prison for {X}
            a {P} judge- | release | {A} | from prison after {N} for {X}
            a court in {P}- | free | {A} | after {N} in jail for {X}
            {A} | leave | | prison after {N} for {X} in {P}
            {A} | complete | | a {N-} prison term for {X} in {P}
            {A} | walk free | | after {N} in prison for {X} in {P}""",
        ),
    ),
    PLAN,
    (),
    COURT_SOURCES,
    extras=DETAIL,
)

LAWSUIT = Group(
    "lawsuit",
    {"A": "company", "B": "company", "X": "dispute", "P": "city"},
    (
        relation(
            "sue",
            """{A} | sue | {B} | over {X} in {P}
            {A} | take | {B} | to court in {P} over {X}
            {A} | file | a lawsuit | against {B} over {X} in {P}
            {A} | bring | a suit | against {B} over {X} in {P}
            {B} | face | | a lawsuit from {A} over {X} in {P}""",
        ),
        relation(
            "drop",
            """{A} | stop suing | {B} | over {X} in {P}
            {A} | drop | a court case | against {B} in {P} over {X}
            {A} | drop | a lawsuit | against {B} over {X} in {P}
            {A} | withdraw | a suit | against {B} over {X} in {P}
            {B} | be spared | | a lawsuit from {A} over {X} in {P}""",
        ),
    ),
    PLAN,
    ("AB",),
    COURT_SOURCES,
    extras=DETAIL,
)

STORM = Group(
    "storm",
    {"A": "storm", "P": "city", "Q": "city"},
    (
        relation(
            "hit",
            """{A} | hit | {P} | ~on its way to {Q}
            {A} | strike | {P} | ~on its way to {Q}
            {A} | batter | {P} | ~on its path to {Q}
            {A} | slam into | {P} | ~on the way to {Q}
            {P} | be hit | | by {A} on its way to {Q}""",
        ),
        relation(
            "miss",
            """{A} | miss | {P} | ~on its way to {Q}
            {A} | spare | {P} | ~on its way to {Q}
            {A} | bypass | {P} | ~on its path to {Q}
            {A} | pass by | {P} | ~on the way to {Q}
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
    {"N": "count", "P": "city", "X": "hazard"},
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
            """the {P} {X}- | close | | because of {Y}
            the {X} in {P}- | shut | | because of {Y}
            {Y}- | close | the {X} in {P}- | to traffic
            {Y}- | shut down | the {P} {X}-
            officials+ | close | the {X} in {P}- | ~because of {Y}""",
        ),
        relation(
            "reopen",
            """the {P} {X}- | reopen | | despite {Y}
            the {X} in {P}- | open again | | despite {Y}
            officials+ | reopen | the {X} in {P}- | ~to traffic despite {Y}
            officials+ | open | the {P} {X}- | ~again despite {Y}
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

TRIAL = Group(
    "trial",
    {"A": "company", "X": "drug", "N": "count", "P": "city"},
    (
        relation(
            "start",
            """{A} | start | a {X} trial | with {N} patients in {P}
            {A} | begin | a trial of a {X} | with {N} patients in {P}
            {A} | start testing | | a {X} on {N} patients in {P}
            {A} | launch | a {X} study | with {N} patients in {P}
            {A's} {X} trial with {N} patients in {P}- | begin""",
        ),
        relation(
            "stop",
            """{A} | stop | a {X} trial | with {N} patients in {P}
            {A} | halt | a trial of a {X} | with {N} patients in {P}
            {A} | stop testing | | a {X} on {N} patients in {P}
            {A} | abandon | a {X} study | with {N} patients in {P}
            {A's} {X} trial with {N} patients in {P}- | end""",
        ),
    ),
    PLAN,
    (),
    ("health officials", "a company statement", "doctors"),
    extras=frozenset({"reason", "detail"}),
)

QUARREL = Group(
    "quarrel",
    {"A": "politician", "B": "politician", "X": "issue", "P": "city"},
    (
        relation(
            "support",
            """{A} | support | {B} | on {X} at a meeting in {P}
            {A} | back | {B} | on {X} at a meeting in {P}
            {A} | side with | | {B} on {X} at a meeting in {P}
            {A} | praise | {B's} stand on {X}- | at a meeting in {P}
            {A} | defend | {B's} stand on {X}- | in a speech in {P}
            {B} | win | | the support of {A} on {X} at a meeting in {P}""",
        ),
        relation(
            "oppose",
            """{A} | oppose | {B} | on {X} at a meeting in {P}
            {A} | challenge | {B} | on {X} at a meeting in {P}
            {A} | break with | | {B} on {X} at a meeting in {P}
            {A} | criticize | {B's} stand on {X}- | at a meeting in {P}
            {A} | attack | {B's} stand on {X}- | in a speech in {P}
            {B} | meet | | the opposition of {A} on {X} at a meeting in {P}""",
        ),
    ),
    (("done", 0.7), ("planned", 0.3)),
    ("AB",),
    ("aides", "local media", "party officials"),
    extras=DETAIL,
)

VOTE = Group(
    "vote",
    {"P": "city", "X": "project", "N": "dollars"},
    (
        relation(
            "approve",
            """the {P} city council- | approve | a {N-} {X}
            the city council in {P}- | vote | | for a {N-} {X}
            lawmakers in {P}+ | approve | plans for a {N-} {X}+
            lawmakers in {P}+ | back | a {X} that would cost {N}
            a {N-} {X}- | win approval | | from the {P} city council""",
        ),
        relation(
            "reject",
            """the {P} city council- | reject | a {N-} {X}
            the city council in {P}- | vote | | against a {N-} {X}
            lawmakers in {P}+ | turn down | plans for a {N-} {X}+
            lawmakers in {P}+ | throw out | a {X} that would cost {N}
            a {N-} {X}- | fail to win approval | | from the {P} city council""",
        ),
    ),
    PLAN,
    (),
    ("local media", "residents", "city officials"),
)

ELECTION = Group(
    "election",
    {"A": "person", "B": "person", "P": "city"},
    (
        relation(
            "win",
            """{A} | defeat | {B} | in the race for mayor of {P}
            {A} | beat | | {B} to become mayor of {P}
            {A} | win | | the {P} mayoral election against {B}
            {A} | be elected | | mayor of {P} ahead of {B}
            {B} | lose | | the race for mayor of {P} to {A}
            {B} | lose | | the {P} mayoral election against {A}
            {B} | be beaten | | by {A} in the race for mayor of {P}""",
        ),
    ),
    (("done", 0.75), ("possible", 0.25)),
    ("AB",),
    ("election officials", "local media"),
    extras=DETAIL,
)

CAUSE = Group(
    "cause",
    {"A": "event", "B": "event", "P": "city"},
    (
        relation(
            "cause",
            """{A} | cause | {B} | in {P}
            {A} | lead | | to {B} in {P}
            {A} | trigger | {B} | in {P}
            {A} | bring about | {B} | in {P}
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
            {A} | precede | {B} | in {P}
            {A} | begin | | earlier than {B} in {P}
            {B} | come | | after {A} in {P}
            {B} | follow | {A} | in {P}
            {B} | begin | | later than {A} in {P}""",
        ),
    ),
    (("done", 1.0),),
    ("AB",),
    dated=False,
)

SUPPORT = Group(
    "support",
    {"Q": "share", "X": "people", "Y": "proposal", "P": "city"},
    (
        relation(
            "for",
            """{Q} {X} in {P}+ | support | {Y}
            {Q} {X} in {P}+ | back | {Y}
            {Q} {X} in {P}+ | vote | | for {Y}
            {Q} {X} in {P}+ | be | | in favor of {Y}
            {Q} {X} in {P}+ | accept | {Y}""",
        ),
        relation(
            "against",
            """{Q} {X} in {P}+ | oppose | {Y}
            {Q} {X} in {P}+ | resist | {Y}
            {Q} {X} in {P}+ | vote | | against {Y}
            {Q} {X} in {P}+ | be | | opposed to {Y}
            {Q} {X} in {P}+ | reject | {Y}""",
        ),
    ),
    (("done", 1.0),),
    (),
    ("a union survey", "local media"),
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

GROUPS = (
    VERDICT, SENTENCE, LAWSUIT, STORM, OUTAGE, TEMPERATURE, EVACUATION, CLOSURE, HEALTH, TRIAL, QUARREL, VOTE, ELECTION,
    CAUSE, ORDER, SUPPORT, SIZE,
)  # fmt: skip
