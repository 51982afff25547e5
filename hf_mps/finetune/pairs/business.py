"""Companies, sport, travel and the arts: what happens there, and the ways to say it."""

from __future__ import annotations

from hf_mps.finetune.pairs.relations import DECISION, PLAN, Group, relation

COMPANY_SOURCES = ("a company statement", "people familiar with the matter", "industry analysts")
TRADE = frozenset({"reason", "detail"})

DEAL = Group(
    "deal",
    {"A": "company", "B": "company", "N": "dollars"},
    (
        relation(
            "buy",
            """{A} | buy | {B} | for {N}
            {A} | acquire | {B} | for {N}
            {A} | take over | {B} | for {N}
            {A} | purchase | {B} | for {N}
            {A} | pay | | {N} for {B}
            {A} | pay | | {N} to take over {B}
            {A's} {N-} purchase of {B}- | go ahead
            the {N-} takeover of {B} by {A}- | go through""",
        ),
        relation(
            "sue",
            """{A} | sue | {B} | for {N}
            {A} | take | {B} | to court for {N}
            {A} | seek | {N}- | from {B} in court
            {A} | bring | a {N-} lawsuit | against {B}
            {A} | file | a lawsuit | against {B} for {N}
            {A} | demand | {N}- | from {B} in a lawsuit
            {A's} {N-} lawsuit against {B}- | go ahead
            the {N-} lawsuit against {B} by {A}- | go ahead""",
        ),
        relation(
            "lend",
            """{A} | lend | {N}- | to {B}
            {A} | lend | | {B} {N}
            {A} | give | | {B} a loan of {N}
            {A} | grant | a {N-} loan | to {B}
            {A} | make | a loan of {N} | to {B}
            {B} | borrow | {N}- | from {A}
            {B} | get | | a {N-} loan from {A}
            {B} | take out | a loan of {N} | from {A}""",
        ),
    ),
    DECISION,
    ("AB",),
    COMPANY_SOURCES,
    extras=TRADE,
)

JOBS = Group(
    "jobs",
    {"A": "company", "N": "staff count", "P": "city"},
    (
        relation(
            "cut",
            """{A} | cut | {N} jobs+ | in {P}
            {A} | lay off | {N} workers+ | in {P}
            {A} | eliminate | {N} positions+ | in {P}
            {A} | shed | {N} jobs+ | in {P}
            {A} | dismiss | {N} employees+ | in {P}
            {N} people+ | lose | | their jobs at {A} in {P}""",
        ),
        relation(
            "add",
            """{A} | create | {N} jobs+ | in {P}
            {A} | hire | {N} workers+ | in {P}
            {A} | fill | {N} new positions+ | in {P}
            {A} | add | {N} jobs+ | in {P}
            {A} | recruit | {N} employees+ | in {P}
            {N} people+ | get | | new jobs at {A} in {P}""",
        ),
    ),
    DECISION,
    (),
    COMPANY_SOURCES,
    extras=TRADE,
)

PLANT = Group(
    "plant",
    {"A": "company", "X": "facility", "P": "city", "N": "millions"},
    (
        relation(
            "open",
            """{A} | open | a {N-} {X} | in {P}
            {A} | start up | a {N-} {X} | in {P}
            {A} | inaugurate | a {X} worth {N}- | in {P}
            {A} | put | a {X} worth {N}- | into service in {P}
            a {N-} {A} {X} in {P}- | open
            {A's} {N-} {X} in {P}- | go into service""",
        ),
        relation(
            "close",
            """{A} | close | a {N-} {X} | in {P}
            {A} | shut down | a {N-} {X} | in {P}
            {A} | shut | a {X} worth {N}- | in {P}
            {A} | take | a {X} worth {N}- | out of service in {P}
            a {N-} {A} {X} in {P}- | close
            {A's} {N-} {X} in {P}- | go out of service""",
        ),
        relation(
            "sell",
            """{A} | sell | a {N-} {X} | in {P}
            {A} | sell off | a {N-} {X} | in {P}
            {A} | part with | | a {X} worth {N} in {P}
            {A} | dispose of | a {X} worth {N}- | in {P}
            a {N-} {A} {X} in {P}- | be sold
            {A's} {N-} {X} in {P}- | change hands""",
        ),
    ),
    DECISION,
    (),
    COMPANY_SOURCES,
    extras=TRADE,
)

RESULTS = Group(
    "results",
    {"A": "company", "X": "measure", "N": "percent"},
    (
        relation(
            "rise",
            """{A's} {X} | rise | | by {N}
            {A's} {X} | increase | | by {N}
            {A's} {X} | climb | | by {N}
            {A's} {X} | grow | | by {N}
            {A's} {X} | go up | | by {N}
            {A} | report | | a rise of {N} in its {X}
            {A} | see | | its {X} increase by {N}""",
        ),
        relation(
            "fall",
            """{A's} {X} | fall | | by {N}
            {A's} {X} | decrease | | by {N}
            {A's} {X} | drop | | by {N}
            {A's} {X} | decline | | by {N}
            {A's} {X} | go down | | by {N}
            {A} | report | | a fall of {N} in its {X}
            {A} | see | | its {X} decrease by {N}""",
        ),
    ),
    (("done", 0.7), ("possible", 0.3)),
    (),
    ("a company statement", "industry analysts", "the quarterly report"),
    extras=TRADE,
)

SUPPLY = Group(
    "supply",
    {"A": "company", "B": "company", "X": "goods"},
    (
        relation(
            "start",
            """{A} | start supplying | | {B} with {X}
            {A} | start supplying | | {X} to {B}
            {A} | begin deliveries of | | {X} to {B}
            {A} | start selling | | {X} to {B}
            {A} | begin to provide | | {B} with {X}
            {B} | start buying | | {X} from {A}
            {B} | begin to get | | {X} from {A}""",
        ),
        relation(
            "stop",
            """{A} | stop supplying | | {B} with {X}
            {A} | stop supplying | | {X} to {B}
            {A} | halt deliveries of | | {X} to {B}
            {A} | stop selling | | {X} to {B}
            {A} | cease to provide | | {B} with {X}
            {B} | stop buying | | {X} from {A}
            {B} | cease to get | | {X} from {A}""",
        ),
    ),
    PLAN,
    ("AB",),
    COMPANY_SOURCES,
    extras=TRADE,
)

SUCCESSION = Group(
    "succession",
    {"A": "person", "B": "person", "C": "company", "X": "post"},
    (
        relation(
            "succeed",
            """{A} | succeed | {B} | as {X} of {C}
            {A} | replace | {B} | as {X} of {C}
            {A} | take over | | from {B} as {X} of {C}
            {C} | name | {A} | to succeed {B} as {X}
            {C} | appoint | {A} | to replace {B} as {X}
            {B} | hand over | | to {A} as {X} of {C}
            {B} | make way | | for {A} as {X} of {C}""",
        ),
    ),
    (("done", 0.65), ("planned", 0.35)),
    ("AB",),
    COMPANY_SOURCES,
    extras=frozenset({"detail"}),
)

SALES = Group(
    "sales",
    {"A": "company", "B": "company", "P": "city"},
    (
        relation(
            "more",
            """{A} | outsell | {B} | in {P}
            {A} | sell | | more than {B} in {P}
            {A} | have | | higher sales than {B} in {P}
            {A} | be | | ~ahead of {B} in sales in {P}
            {B} | sell | | less than {A} in {P}
            {B} | have | | lower sales than {A} in {P}
            {B} | be | | behind {A} in sales in {P}""",
        ),
    ),
    (("done", 0.75), ("possible", 0.25)),
    ("AB",),
    ("industry analysts", "market researchers"),
    extras=frozenset({"detail"}),
)

MATCH = Group(
    "match",
    {"A": "team", "B": "team", "S": "score", "P": "city"},
    (
        relation(
            "win",
            """{A} | beat | {B} | {S} in {P}
            {A} | defeat | {B} | {S} in {P}
            {A} | overcome | {B} | {S} in {P}
            {A} | win | | {S} against {B} in {P}
            {A} | claim | a {S-} victory | over {B} in {P}
            {B} | lose | | {S} to {A} in {P}
            {B} | suffer | | a {S-} defeat to {A} in {P}
            {B} | go down | | {S} against {A} in {P}""",
        ),
    ),
    (("done", 1.0),),
    ("AB",),
    ("league officials", "local media"),
)

TRANSFER = Group(
    "transfer",
    {"A": "person", "B": "team", "C": "team", "N": "millions"},
    (
        relation(
            "move",
            """{A} | join | {B} | ~from {C} for {N}
            {A} | move | | to {B} from {C} for {N}
            {A} | leave | | {C} for {B} in a {N-} deal
            {A} | switch | | from {C} to {B} for {N}
            {B} | sign | {A} | ~from {C} for {N}
            {B} | buy | {A} | ~from {C} for {N}
            {C} | sell | {A} | ~to {B} for {N}""",
        ),
    ),
    PLAN,
    ("BC",),
    ("league officials", "local media", "the player's agent"),
    extras=frozenset({"detail"}),
)

GOALS = Group(
    "goals",
    {"A": "person", "B": "team", "C": "team", "N": "few"},
    (
        relation(
            "score",
            """{A} | score | {N} goals+ | ~for {B} against {C}
            {A} | score | | {N} times for {B} against {C}
            {A} | net | | {N} times for {B} against {C}
            {A} | find the net | | {N} times for {B} against {C}
            {A} | get | | {N} goals for {B} against {C}""",
        ),
        relation(
            "miss",
            """{A} | miss | {N} chances+ | ~for {B} against {C}
            {A} | miss | | {N} times for {B} against {C}
            {A} | shoot wide | | {N} times for {B} against {C}
            {A} | fail to score | | {N} times for {B} against {C}
            {A} | waste | {N} chances+ | ~for {B} against {C}""",
        ),
    ),
    (("done", 1.0),),
    ("BC",),
    ("league officials", "local media"),
    extras=frozenset({"detail"}),
)

ROUTE = Group(
    "route",
    {"A": "airline", "P": "city", "Q": "city"},
    (
        relation(
            "launch",
            """{A} | launch | flights+ | from {P} to {Q}
            {A} | start flying | | from {P} to {Q}
            {A} | introduce | flights+ | from {P} to {Q}
            {A} | start | service- | from {P} to {Q}
            {A's} flights from {P} to {Q}+ | begin""",
        ),
        relation(
            "drop",
            """{A} | drop | flights+ | from {P} to {Q}
            {A} | stop flying | | from {P} to {Q}
            {A} | cancel | flights+ | from {P} to {Q}
            {A} | end | service- | from {P} to {Q}
            {A's} flights from {P} to {Q}+ | end""",
        ),
    ),
    DECISION,
    ("PQ",),
    ("a company statement", "airport officials", "travel agents"),
    extras=TRADE,
)

GIFT = Group(
    "gift",
    {"A": "house", "B": "house", "N": "millions"},
    (
        relation(
            "give",
            """{A} | give | {N}- | to {B}
            {A} | give | | {B} {N}
            {A} | donate | {N}- | to {B}
            {A} | make | a gift of {N} | to {B}
            {A} | make | a {N-} donation | to {B}
            {B} | receive | {N}- | from {A} as a gift
            {B} | get | | a {N-} gift from {A}""",
        ),
        relation(
            "lend",
            """{A} | lend | {N}- | to {B}
            {A} | lend | | {B} {N}
            {A} | loan | {N}- | to {B}
            {A} | make | a loan of {N} | to {B}
            {A} | grant | a {N-} loan | to {B}
            {B} | receive | {N}- | from {A} as a loan
            {B} | get | | a {N-} loan from {A}""",
        ),
    ),
    DECISION,
    ("AB",),
    ("trustees", "a statement"),
)

ART = Group(
    "art",
    {"A": "house", "B": "person", "X": "artwork", "N": "millions"},
    (
        relation(
            "buy",
            """{A} | buy | a {X} by {B}- | for {N}
            {A} | acquire | a {X} by {B}- | for {N}
            {A} | purchase | a {X} by {B}- | for {N}
            {A} | pay | {N}- | for a {X} by {B}
            {A} | obtain | a {X} by {B}- | in a {N-} deal""",
        ),
        relation(
            "sell",
            """{A} | sell | a {X} by {B}- | for {N}
            {A} | sell off | a {X} by {B}- | for {N}
            {A} | part with | | a {X} by {B} for {N}
            {A} | raise | | {N} by selling a {X} by {B}
            {A} | dispose of | a {X} by {B}- | in a {N-} deal""",
        ),
    ),
    DECISION,
    (),
    ("trustees", "art dealers", "a statement"),
)

PRIZE = Group(
    "prize",
    {"A": "person", "B": "person", "X": "prize"},
    (
        relation(
            "win",
            """{A} | beat | {B} | to the {X}
            {A} | win | the {X} | ~ahead of {B}
            {A} | take | the {X} | ~ahead of {B}
            {A} | finish | | ahead of {B} in the contest for the {X}
            {B} | lose out | | to {A} in the contest for the {X}
            {B} | finish | | behind {A} in the contest for the {X}
            {B} | lose | | the {X} to {A}""",
        ),
    ),
    (("done", 1.0),),
    ("AB",),
    ("the jury", "organizers"),
    extras=frozenset({"detail"}),
)

GROUPS = (
    DEAL, JOBS, PLANT, RESULTS, SUPPLY, SUCCESSION, SALES, MATCH, TRANSFER, GOALS, ROUTE, GIFT, ART, PRIZE,
)  # fmt: skip
