# Finds the Torch of the Python that the build serves. Sets KNAPFORMER_TORCH_FOUND, KNAPFORMER_TORCH_DIR (the package's
# folder; to use a LibTorch without Python, set it to LibTorch's folder) and TORCH_PYTHON_LIBRARY, and defines the
# target knapformer_libtorch.
#
# find_package(Torch) is not used: for a CUDA build of torch it requires a CUDA toolkit, which nothing here needs.
#
# An isolated build (pip's default) hides the environment's packages through PYTHONPATH; `python -E` sees them again, so
# that the extension is built against the torch that it will run with.
set(KNAPFORMER_TORCH_FOUND OFF)
set(_where "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")
foreach(_flags "" "-E")
  if(NOT KNAPFORMER_TORCH_DIR)
    execute_process(COMMAND ${Python_EXECUTABLE} ${_flags} -c "${_where}"
                    OUTPUT_VARIABLE KNAPFORMER_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endforeach()

if(KNAPFORMER_TORCH_DIR)
  set(TORCH_INCLUDE_DIRS ${KNAPFORMER_TORCH_DIR}/include ${KNAPFORMER_TORCH_DIR}/include/torch/csrc/api/include)
  set(TORCH_LIBRARIES "")
  foreach(_library torch_cpu c10)
    find_library(_${_library}_path ${_library} PATHS ${KNAPFORMER_TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
    list(APPEND TORCH_LIBRARIES ${_${_library}_path})
  endforeach()
  find_library(TORCH_PYTHON_LIBRARY torch_python PATHS ${KNAPFORMER_TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE)
  add_library(knapformer_libtorch INTERFACE IMPORTED GLOBAL)
  # SYSTEM silences warnings in torch's headers. The definitions are those of torch's wheels; c10d's headers check them.
  target_include_directories(knapformer_libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
  target_link_libraries(knapformer_libtorch INTERFACE ${TORCH_LIBRARIES})
  target_compile_definitions(knapformer_libtorch INTERFACE USE_DISTRIBUTED USE_C10D)
  file(STRINGS ${KNAPFORMER_TORCH_DIR}/include/torch/headeronly/version.h KNAPFORMER_TORCH_VERSION
       REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
  set(KNAPFORMER_TORCH_FOUND ON)
  message(STATUS "knapformer: building against torch in ${KNAPFORMER_TORCH_DIR}")
elseif(KNAPFORMER_TORCH STREQUAL "ON" OR SKBUILD)
  # A planner-only wheel lacks what most users want, so it must be asked for. uv builds where it cannot see the
  # environment's packages.
  message(FATAL_ERROR "knapformer: this build sees no torch, and what it would install could only plan.\n"
    "With torch (pip; then uv):\n"
    "    pip install torch && pip install .\n"
    "    uv pip install torch --group build && uv pip install --no-build-isolation .\n"
    "The planner alone, without torch:\n"
    "    pip install . --config-settings=cmake.define.KNAPFORMER_TORCH=OFF\n")
else()
  message(STATUS "knapformer: no torch found; building the planner only")
endif()
