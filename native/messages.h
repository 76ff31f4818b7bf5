// Messages as Python sees them; see src/carrier.h.
#pragma once

#include <nanobind/nanobind.h>

void bind_messages(nanobind::module_& module);
