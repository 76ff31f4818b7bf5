// Headers and flows as Python sees them; see src/flow.h.
#pragma once

#include <nanobind/nanobind.h>

void bind_messages(nanobind::module_& module);
