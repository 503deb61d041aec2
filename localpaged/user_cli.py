"""`localpaged user`: who may use the server besides the one who has its own key."""

import json
from datetime import datetime
from typing import Annotated

import typer

from localpaged.home import home
from localpaged.server.users import Users

user_app = typer.Typer(help="Users of the server, each with a key and own conversations.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")]


@user_app.command("add", epilog="Example: localpaged user add anna")
def add(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")], json_output: Json = False
) -> None:
    """Add a user and print the key, which is shown this once; a running server knows it at once."""
    key = _users().add(name)
    if json_output:
        print(json.dumps({"name": name, "key": key}))
        return
    print(f"{name}'s key, for the login page and the API; it is not shown again:\n{key}")


@user_app.command("list")
def list_users(json_output: Json = False) -> None:
    """List the users."""
    users = _users().all()
    if json_output:
        print(json.dumps([{"name": user.name, "created": user.created} for user in users]))
        return
    if not users:
        print("There are no users. Add one: localpaged user add NAME")
    for user in users:
        print(f"{user.name:<34} since {datetime.fromtimestamp(user.created):%Y-%m-%d %H:%M}")


@user_app.command("rm")
def rm(name: Annotated[str, typer.Argument(help="Name.")]) -> None:
    """Take a user's key back. The conversations stay, and are there again when the name is added again."""
    _users().remove(name)
    print(f"{name}'s key is no longer taken.")


def _users() -> Users:
    return Users(home() / "users.json")
