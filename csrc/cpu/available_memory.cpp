#include "cpu/available_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

namespace symm_overlap::cpu {

namespace {

const std::string kRoot = "/sys/fs/cgroup";

// The names of a memory controller's files, which differ between the two versions of cgroups.
struct Files {
  const char* limit;
  const char* usage;
  const char* cached[2];  // fields of memory.stat
};

constexpr Files kVersion1{
    "/memory.limit_in_bytes", "/memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
constexpr Files kVersion2{"/memory.max", "/memory.current", {"inactive_file", "active_file"}};

// The number in a file; SIZE_MAX if there is no file, or no limit ("max").
size_t number_in(const std::string& path) {
  std::ifstream file(path);
  size_t number = 0;
  return file >> number ? number : SIZE_MAX;
}

// What one cgroup allows, besides what its processes use already.
size_t allowed_by(const std::string& group, const Files& files) {
  const size_t limit = number_in(group + files.limit), usage = number_in(group + files.usage);
  if (limit == SIZE_MAX || usage == SIZE_MAX) return SIZE_MAX;
  size_t cached = 0, value = 0;
  std::ifstream stat(group + "/memory.stat");
  for (std::string name; stat >> name >> value;) {
    if (name == files.cached[0] || name == files.cached[1]) cached += value;
  }
  return limit - std::min(limit, usage - std::min(usage, cached));
}

// What a cgroup and all groups around it allow. In a container, a path may lead to nothing until it reaches the root of
// what is mounted there, which is the container's own group.
size_t allowed_from(std::string path, const std::string& mount, const Files& files) {
  size_t allowed = allowed_by(mount, files);
  while (!path.empty() && path != "/") {
    allowed = std::min(allowed, allowed_by(mount + path, files));
    path.erase(path.rfind('/'));
  }
  return allowed;
}

}  // namespace

size_t available_memory() {
  size_t available = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  std::string name, rest;
  for (size_t kib = 0; meminfo >> name >> kib; std::getline(meminfo, rest)) {
    if (name == "MemAvailable:") available = kib << 10;
  }
  // A line has a number, the controllers, and a path: "4:memory:/user/job" in version 1, "0::/user/job" in version 2.
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") available = std::min(available, allowed_from(path, kRoot, kVersion2));
    if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, allowed_from(path, kRoot + "/memory", kVersion1));
    }
  }
  return available;
}

}  // namespace symm_overlap::cpu
