"""Names and nouns. Proper names are held out: a quarter of every list is for validation only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_mps.finetune.pairs.draws import Draws
from hf_mps.finetune.pairs.words import words


@dataclass(frozen=True)
class Value:
    """What fills a role: every form says the same thing.

    `stem` tells two values apart, `modifiers` are the forms before a noun (`five-year`), `later` the forms of a date
    that lies ahead.
    """

    stem: str
    forms: tuple[str, ...]
    plural: bool = False
    modifiers: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


def part(names: Sequence[str], held_out: bool) -> list[str]:
    """Return the quarter of `names` that is held out, or the other three."""
    return [one for place, one in enumerate(names) if (place % 4 == 3) == held_out]


FIRST_NAMES = words(
    """Maria James Aisha Victor Helen Omar Ruth Daniel Priya Martin Sofia Kevin Nadia Peter Grace Luis Irene Samuel
    Yuki Thomas Clara Ahmed Joan Felix Teresa Ivan Monica Andre Lucy Hugo Diana Patrick Elena Walter Nina Oscar
    Amara Simon Julia Raj"""
)
SURNAMES = words(
    """Lindqvist Okafor Brennan Castillo Weaver Petrov Nakamura Hollis Abbott Farouk Delgado Whitfield Sorensen Mbeki
    Carver Iyer Lombardi Novak Tremblay Haddad Winslow Keller Osborne Ramirez Fontaine Gallagher Schultz Mwangi
    Prescott Aldridge Barnes Kowalski Mercer Tanaka Underwood Vasquez Hartley Jensen Larkin Moreau Pruitt Rosario
    Stanton Thorne Ueda Varga Whelan Yates Zimmer Ashford Bellamy Crowley Dunmore Eriksen Fairchild Gupta Hargrove
    Ibarra Jorgensen Kendrick Lassiter Maddox Nolan Ortega Pennington Quigley Redmond Sandoval Talbot Ulrich Velasco
    Wakefield Yilmaz Zeller Bancroft Calloway Driscoll Espinoza Fenwick Greenwood"""
)
CITIES = words(
    """Denver Boston Lisbon Nairobi Toronto Glasgow Osaka Dallas Oslo Lima Phoenix Dublin Warsaw Atlanta Perth Madrid
    Seattle Prague Cairo Leeds Chicago Athens Mumbai Houston Vienna Bogota Detroit Helsinki Manila Tampa Brussels
    Quito Memphis Geneva Lagos Omaha Berlin Santiago Tucson Bristol Zagreb Cleveland Kyoto Ottawa Porto Baltimore
    Ankara Calgary Milan Portland Tunis Sheffield Montreal Accra Austin Krakow Sydney Richmond Hanoi Turin"""
)
STEMS = words(
    """Halden Meridian Corvex Brightwell Tessaro Northgate Quillon Ardent Velmar Stonebridge Lumora Kestrel Oakhurst
    Pallas Zentrix Fairmont Dunlow Solvanta Redfern Cobalt Isomer Granite Wexley Altura Mirabel Trident Harrow
    Nimbus Osprey Pinecrest Ravelin Sable Tamarack Umbra Verity Westmark Axiom Birchwood Calder Delphi Everline
    Foxglove Gantry Hollin Inkwell Juniper Keystone Larkspur Monarch Novalis Orchard Pemberton Quartz Rosewater
    Summit Thornbury Unison Vantage Willow Zephyr"""
)
COMPANY_KINDS = words("""Foods Bank Motors Energy Systems Media Textiles Steel Pharma Chemicals Software Paper""")
AIRLINE_KINDS = words("Airlines Airways Air")
NICKNAMES = words(
    """Falcons Pirates Comets Rangers Wolves Thunder Bears Miners Hawks Sailors Giants Lions Rockets Royals Bulls Foxes
    Storm Dragons Eagles Tigers Knights Pilots Sharks Kings"""
)
STORMS = words(
    """Lena Boris Odette Marco Ingrid Clyde Wanda Ernest Dora Hector Paulina Jasper Flora Gustav Norma Rufus Celia
    Magnus Opal Conrad Estelle Bruno Greta Alvin"""
)
HOUSES = words(
    """Harlow Tilden Ashby Merrow Linden Corwin Easton Garrick Hobart Ingram Jarvis Kingsley Lathrop Milburn Norwood
    Oakes Parrish Quimby Radley Selwyn Tolland Upton Vernon Wyndham"""
)
HOUSE_KINDS = words("Foundation Museum Library Institute Trust Hospital")
TITLES = words("Governor Senator Mayor Congressman Minister")


def _person(draws: Draws, held_out: bool, title: str = "") -> Value:
    first, last = draws.pick(part(FIRST_NAMES, held_out)), draws.pick(part(SURNAMES, held_out))
    forms: tuple[str, ...] = (f"{first} {last}", last)
    if title:
        forms = (f"{title} {first} {last}", f"{title} {last}", f"{first} {last}")
    return Value(last, forms)


def _company(draws: Draws, held_out: bool, kinds: Sequence[str] = COMPANY_KINDS) -> Value:
    stem = draws.pick(part(STEMS, held_out))
    name = f"{stem} {draws.pick(kinds)}"
    return Value(stem, (name, name, stem))


def _team(draws: Draws, held_out: bool) -> Value:
    city, nickname = draws.pick(part(CITIES, held_out)), draws.pick(part(NICKNAMES, held_out))
    return Value(nickname, (f"the {city} {nickname}", f"the {nickname}"), plural=True)


def _storm(draws: Draws, held_out: bool) -> Value:
    name = draws.pick(part(STORMS, held_out))
    kind = draws.pick(("Hurricane", "Tropical Storm", "Cyclone"))
    return Value(name, (f"{kind} {name}", name))


def _house(draws: Draws, held_out: bool) -> Value:
    stem = draws.pick(part(HOUSES, held_out))
    name = f"the {stem} {draws.pick(HOUSE_KINDS)}"
    return Value(stem, (name,))


def _university(draws: Draws, held_out: bool) -> Value:
    if draws.chance(0.5):
        city = draws.pick(part(CITIES, held_out))
        return Value(city, (f"the University of {city}", f"{city} University"))
    stem = draws.pick(part(HOUSES, held_out))
    return Value(stem, (f"{stem} University", f"the University of {stem}"))


def _city(draws: Draws, held_out: bool) -> Value:
    city = draws.pick(part(CITIES, held_out))
    return Value(city, (city, city, city, f"the city of {city}"), modifiers=(city,))


def name(kind: str, draws: Draws, held_out: bool) -> Value:
    """Draw a proper name of a kind: company, airline, person, politician, team, storm, house, university or city."""
    if kind == "company":
        return _company(draws, held_out)
    if kind == "airline":
        return _company(draws, held_out, AIRLINE_KINDS)
    if kind == "person":
        return _person(draws, held_out)
    if kind == "politician":
        return _person(draws, held_out, draws.pick(TITLES))
    makers = {"team": _team, "storm": _storm, "house": _house, "university": _university, "city": _city}
    return makers[kind](draws, held_out)


NAMES = frozenset({"company", "airline", "person", "politician", "team", "storm", "house", "university", "city"})


def _nouns(text: str) -> tuple[Value, ...]:
    """Read values written as `form / form : modifier / modifier`; a + at the end makes the value plural."""
    values = []
    for line in map(str.strip, text.splitlines()):
        said, _, before = line.rstrip("+").partition(" : ")
        forms, modifiers = (tuple(one.strip() for one in part.split(" / ")) for part in (said, before or said))
        values.append(Value(forms[0], forms, line.endswith("+"), modifiers))
    return tuple(values)


# Nouns that every split uses; each line is one meaning.
NOUNS: dict[str, tuple[Value, ...]] = {
    "facility": _nouns(
        """factory / plant
        warehouse / storage depot
        research laboratory / research lab
        call center
        store / shop
        data center
        training school"""
    ),
    "measure": _nouns(
        """net profit / net income
        revenue / turnover
        debt / borrowing
        operating costs / running costs+
        share price / stock price
        exports / foreign sales+"""
    ),
    "goods": _nouns(
        """batteries
        engine parts / engine components
        computer chips / semiconductors
        packaging
        solar panels
        steel / steel products
        medicines / drugs
        paper / paper goods"""
    ),
    "post": _nouns(
        """chief executive / CEO
        finance chief / chief financial officer
        chairman / head of the board
        head of research / research chief
        sales director / director of sales
        general counsel / top lawyer"""
    ),
    "crime": _nouns(
        """fraud
        murder / homicide
        theft / stealing : theft
        bribery / paying bribes : bribery
        arson / setting fires : arson
        tax evasion / dodging taxes : tax evasion / tax
        smuggling
        kidnapping / abduction"""
    ),
    "dispute": _nouns(
        """patent rights / patents
        unpaid bills / unpaid invoices
        stolen designs / design theft
        a canceled contract / a broken contract
        faulty parts / defective parts
        misleading advertisements / misleading ads"""
    ),
    "hazard": _nouns(
        """flooding / floods
        a wildfire / a forest fire
        a gas leak / leaking gas
        a mudslide / a landslide
        an earthquake / a quake
        a chemical spill"""
    ),
    "weather": _nouns(
        """heavy snow / a snowstorm
        thick fog / dense fog
        a strike / a walkout
        a power failure / a blackout
        high winds / strong winds
        a bomb threat / a bomb scare
        a burst pipe"""
    ),
    "link": _nouns(
        """airport
        harbor / port
        railway station / train station
        main bridge
        ring road / beltway
        subway / metro"""
    ),
    "habit": _nouns(
        """regular exercise / exercising regularly
        drinking coffee / coffee
        a diet rich in fish / eating a lot of fish
        working at night / night work
        a high-salt diet / eating a lot of salt
        afternoon sleep / an afternoon nap
        breathing polluted air / air pollution
        green tea / drinking green tea"""
    ),
    "disease": _nouns(
        """heart disease
        diabetes
        stroke / a stroke
        depression
        lung cancer / cancer of the lung
        asthma
        kidney failure / renal failure
        memory loss / loss of memory"""
    ),
    "drug": _nouns(
        """malaria vaccine / vaccine against malaria : malaria vaccine
        flu vaccine / influenza vaccine
        cancer drug / cancer medicine
        painkiller / pain drug
        asthma inhaler / inhaler for asthma : asthma inhaler
        sleeping pill / sleep drug"""
    ),
    "issue": _nouns(
        """taxes / taxation
        immigration / immigration policy
        school funding / money for schools
        gun control / gun laws
        climate change / global warming
        health care / medical care
        the budget / the spending plan
        housing / housing policy"""
    ),
    "project": _nouns(
        """stadium / sports arena
        subway line / metro line
        water treatment plant
        prison / jail
        concert hall
        housing project / housing development
        wind farm / wind park
        bridge
        hospital"""
    ),
    "prize": _nouns(
        """national book award
        award for best actor / best actor award
        design prize / prize for design
        gold medal / top medal
        chess title / chess championship
        poetry prize / prize for poetry"""
    ),
    "artwork": _nouns(
        """painting / canvas
        sculpture
        portrait
        diary / journal
        manuscript
        collection of letters"""
    ),
    "event": _nouns(
        """the strike / the walkout
        the blackout / the power cut
        the protests / the demonstrations+
        the price increase / the price rise
        the shortage of fuel / the fuel shortage
        the riot
        the school closures+
        the change of government
        the collapse of the bank / the bank's collapse
        the fire / the blaze
        the election / the vote
        the traffic chaos
        the water crisis / the lack of water
        the drop in tourism / the decline in tourism"""
    ),
    "people": _nouns(
        """teachers / schoolteachers+
        nurses+
        voters+
        students+
        shopkeepers / shop owners+
        doctors / physicians+
        bus drivers+
        farmers+"""
    ),
    "proposal": _nouns(
        """the pay offer / the wage offer
        the new contract
        the smoking ban / the ban on smoking
        the merger / the merger plan
        the new timetable / the new schedule
        the tax increase / the higher tax"""
    ),
    "share": _nouns(
        """all / all of the
        most / a majority of / more than half of the
        few / only a handful of the
        none of the / no"""
    ),
    "reason": _nouns(
        """new tax rules / changes in tax law
        pressure from investors / investor pressure
        currency swings
        a change of strategy / a new strategy
        a government inquiry / a government investigation
        changes in the market / market changes
        a court order / a ruling by a court
        safety concerns / worries about safety"""
    ),
}
