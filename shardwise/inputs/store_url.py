"""Where checkpoints lie beside the run folder: a folder or a URL, in plain words and without a secret in it."""

from urllib.parse import urlsplit

from shardwise.errors import RecipeError

_KEYS_FROM = "the environment or the provider's own files (AWS_PROFILE, ~/.aws, a role) give the keys"


def is_url(location: str) -> bool:
    return "://" in location


def redacted(url: str) -> str:
    """The URL without user, password, query and fragment: what may be printed of one that somebody gave."""
    if not is_url(url):
        return url
    scheme, _, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def require_plain(location: str, key: str) -> None:
    """Raises: RecipeError, which never repeats a secret, for a URL with a user, password or query in it, one that names
    no bucket or host, or one that is several in one.
    """
    if not is_url(location):
        return
    parts = urlsplit(location)
    said = f'{key} = "{redacted(location)}"'
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise RecipeError(
            f"{said} was given with a user, a password or a query in it, which are left out here.",
            why="a recipe is copied into plans, records and logs, and a secret must not be",
            fix=f"write {said}; {_KEYS_FROM}",
        )
    if "::" in location:
        raise RecipeError(f"{said} is several URLs in one.", why="a cache in between may hold what is not yet stored",
                          fix="give the last of them alone")  # fmt: skip
    if not parts.netloc and parts.scheme not in ("file", "memory"):
        raise RecipeError(f"{said} names no bucket or host.", fix=f"{key} = {parts.scheme}://bucket/prefix")


def require_folder(run: str) -> None:
    """Raises: RecipeError for a run folder that is a URL."""
    if not is_url(run):
        return
    where = redacted(run).rstrip("/")
    raise RecipeError(
        f'run = "{where}" is a URL, and a run folder is on a file system.',
        why="its lock, its events and its logs are appended to and locked, which object stores do not offer",
        fix=f'run = "runs/{where.rpartition("/")[2]}", and for the checkpoints checkpoint.store = "{where}"',
    )
