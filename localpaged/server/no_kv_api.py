"""/api/kv where another server answers: it is said that there is no pool to look into."""

from fastapi import APIRouter

from localpaged.errors import FeatureAbsentError


def router(address: str) -> APIRouter:
    """Every path under /api/kv, as absent."""
    routes = APIRouter(prefix="/api/kv", tags=["kv"])

    @routes.api_route("", methods=["GET", "DELETE"])
    @routes.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def absent(path: str = "") -> None:
        raise FeatureAbsentError(
            f"The model runs on the server at {address}, which keeps its KV itself: there is no pool here to "
            "show, price or pin."
        )

    return routes
