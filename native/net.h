// Interfaces, lanes and tasks as Python sees them; see src/net.
#pragma once

#include <nanobind/nanobind.h>

void bind_net(nanobind::module_& module);
