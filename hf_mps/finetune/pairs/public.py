"""Courts, politics and medicine: what happens there, and the ways to say it."""

from __future__ import annotations

from hf_mps.finetune.pairs.relations import PLAN, Group, relation

COURT_SOURCES = ("court officials", "prosecutors", "lawyers")
DETAIL = frozenset({"detail"})

VERDICT = Group(
    "verdict",
    {"A": "person", "X": "crime", "P": "city"},
    (
        relation(
            "convict",
            """a jury in {P}- | convict | {A} | of {X}
            a {P-} jury- | find | {A} | guilty of {X}
            a court in {P}- | find | {A} | guilty of {X}
            a {P-} court- | convict | {A} | of {X}
            {A} | lose | | a {X-} case in a {P-} court""",
        ),
        relation(
            "acquit",
            """a jury in {P}- | acquit | {A} | of {X}
            a {P-} jury- | find | {A} | not guilty of {X}
            a court in {P}- | find | {A} | innocent of {X}
            a {P-} court- | clear | {A} | of {X}
            {A} | win | | a {X-} case in a {P-} court""",
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
            a {P-} judge- | send | {A} | to prison for {N} for {X}
            a court in {P}- | jail | {A} | for {N} for {X}
            {A} | get | | {N} in prison for {X} in {P}
            {A} | receive | | a {N-} prison term for {X} in {P}
            {A} | go | | to prison for {N} for {X} in {P}""",
        ),
        relation(
            "free",
            """a judge in {P}- | free | {A} | after {N} in prison for {X}
            a {P-} judge- | release | {A} | from prison after {N} for {X}
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
            """{A} | stop suing | | {B} over {X} in {P}
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
            {A} | defend | {B's} stand on {X}- | at a meeting in {P}
            {B} | win | | the support of {A} on {X} at a meeting in {P}""",
        ),
        relation(
            "oppose",
            """{A} | oppose | {B} | on {X} at a meeting in {P}
            {A} | challenge | {B} | on {X} at a meeting in {P}
            {A} | break with | | {B} on {X} at a meeting in {P}
            {A} | criticize | {B's} stand on {X}- | at a meeting in {P}
            {A} | attack | {B's} stand on {X}- | at a meeting in {P}
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
    {"P": "city", "X": "project", "N": "millions"},
    (
        relation(
            "approve",
            """the {P-} city council- | approve | a {N-} {X}
            the council of the city of {P}- | vote | | for a {N-} {X}
            lawmakers in {P}+ | approve | plans for a {N-} {X}+
            lawmakers in {P}+ | back | a {X} that would cost {N}
            a {N-} {X}- | win approval | | from the {P-} city council""",
        ),
        relation(
            "reject",
            """the {P-} city council- | reject | a {N-} {X}
            the council of the city of {P}- | vote | | against a {N-} {X}
            lawmakers in {P}+ | turn down | plans for a {N-} {X}+
            lawmakers in {P}+ | throw out | a {X} that would cost {N}
            a {N-} {X}- | fail to win approval | | from the {P-} city council""",
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
            {A} | win | | the {P-} mayoral election against {B}
            {A} | be elected | | mayor of {P} ahead of {B}
            {B} | lose | | the race for mayor of {P} to {A}
            {B} | lose | | the {P-} mayoral election against {A}
            {B} | be beaten | | by {A} in the race for mayor of {P}""",
        ),
    ),
    (("done", 0.75), ("possible", 0.25)),
    ("AB",),
    ("election officials", "local media"),
    extras=DETAIL,
)

SUPPORT = Group(
    "support",
    {"Q": "share", "X": "people", "Y": "proposal", "P": "city"},
    (
        relation(
            "for",
            """{Q} {X} in {P}+ | support | | {Y}
            {Q} {X} in {P}+ | back | | {Y}
            {Q} {X} in {P}+ | vote | | for {Y}
            {Q} {X} in {P}+ | be | | in favor of {Y}
            {Q} {X} in {P}+ | accept | | {Y}""",
        ),
        relation(
            "against",
            """{Q} {X} in {P}+ | oppose | | {Y}
            {Q} {X} in {P}+ | resist | | {Y}
            {Q} {X} in {P}+ | vote | | against {Y}
            {Q} {X} in {P}+ | be | | opposed to {Y}
            {Q} {X} in {P}+ | reject | | {Y}""",
        ),
    ),
    (("done", 1.0),),
    (),
    ("a union survey", "local media"),
)

TRIAL = Group(
    "trial",
    {"A": "company", "X": "drug", "N": "staff count", "P": "city"},
    (
        relation(
            "start",
            """{A} | start | a {X-} trial | with {N} patients in {P}
            {A} | begin | a trial of a {X} | with {N} patients in {P}
            {A} | start testing | | a {X} on {N} patients in {P}
            {A} | launch | a {X-} study | with {N} patients in {P}
            {A's} {X-} trial with {N} patients in {P}- | begin""",
        ),
        relation(
            "stop",
            """{A} | stop | a {X-} trial | with {N} patients in {P}
            {A} | halt | a trial of a {X} | with {N} patients in {P}
            {A} | stop testing | | a {X} on {N} patients in {P}
            {A} | abandon | a {X-} study | with {N} patients in {P}
            {A's} {X-} trial with {N} patients in {P}- | end""",
        ),
    ),
    PLAN,
    (),
    ("health officials", "a company statement", "doctors"),
    extras=frozenset({"reason", "detail"}),
)

GROUPS = (VERDICT, SENTENCE, LAWSUIT, QUARREL, VOTE, ELECTION, SUPPORT, TRIAL)
