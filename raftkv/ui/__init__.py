"""The dashboard: what a browser loads from the client port of a member, at ``/ui/``.

Owns ``static/``, files that are served as they are: one page, style sheets and ES modules, without a framework, a build
step or a request to anywhere else. ``static/frame`` is what all views stand on, and ``static/views`` has one module (or
two) a view:

    import { view } from "../frame/router.js";
    view("keys", { title: "Keys", mount(root, route, scope) { ... } });

Leaves out serving them, and the live figures of members (``raftkv.server.ui``). Data come by the ``/v3`` gateway.
"""
