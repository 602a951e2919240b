"""Tenuto's router for Ray Serve: `request_router_class="tenuto.ray.router:TenutoRouter"`."""
