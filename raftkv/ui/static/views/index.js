// All views, in any order: each registers itself.

import "./cluster.js";
import "./keys.js";
import "./leases.js";
import "./watchers.js";
import "./contests.js";
import "./runs.js";
import "./checkpoints.js";
