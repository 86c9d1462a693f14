# Finds nlohmann-json: the system's, or the one from the Python package index (where a pip build brings it).
find_package(nlohmann_json 3.10 QUIET CONFIG)
if(NOT TARGET nlohmann_json::nlohmann_json)
  find_package(Python COMPONENTS Interpreter QUIET)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; print(u.find_spec('nlohmann_json').submodule_search_locations[0])"
    OUTPUT_VARIABLE _package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(NLOHMANN_JSON_INCLUDE nlohmann/json.hpp HINTS ${_package}/include)
  if(NOT NLOHMANN_JSON_INCLUDE)
    message(FATAL_ERROR "knapformer: nlohmann-json not found. Install nlohmann-json3-dev (Debian) or `pip install nlohmann-json`.")
  endif()
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  set_target_properties(nlohmann_json::nlohmann_json PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${NLOHMANN_JSON_INCLUDE})
endif()
