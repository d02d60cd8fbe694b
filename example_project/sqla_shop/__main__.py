"""The shop's command line: `python -m example_project.sqla_shop race` and `seed`."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

from example_project.race import RaceFailed
from example_project.race.command import HELP, add_options, race
from example_project.sqla_shop import settings
from example_project.sqla_shop.actions import pay
from example_project.sqla_shop.database import make_tables, open_database, sessions
from example_project.sqla_shop.models import Product
from example_project.sqla_shop.racing import SqlaShop

PRODUCTS = {"Teapot, cast iron": 4800, "Espresso cups, set of six": 3650, "Kettle": 7990, "Oak tray": 2400}


def main() -> None:
    parser = ArgumentParser("python -m example_project.sqla_shop", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("seed", help="make the tables, and twelve paid orders, to ship and to cancel by hand")
    shop, text = SqlaShop(), HELP.format(server=SqlaShop.server)
    racing = commands.add_parser("race", description=text, formatter_class=RawDescriptionHelpFormatter)
    add_options(shop, racing.add_argument)
    options = vars(parser.parse_args())
    try:
        race(shop, **options) if options.pop("command") == "race" else seed()
    except RaceFailed as error:
        sys.exit(f"race: {error}")


def seed() -> None:
    make_tables(open_database(settings.DATABASE_URL))
    with sessions.begin() as session:
        products = [Product(name=name, price=price, stock=40) for name, price in PRODUCTS.items()]
        for number in range(12):
            pay(session, products[number % len(products)], quantity=1 + number % 3)
    print("12 paid orders added. Look at them: uvicorn example_project.sqla_shop.app:app")


if __name__ == "__main__":
    main()
