# Finds the Torch of the Python that the build serves. Sets KNAPFORMER_TORCH_FOUND, KNAPFORMER_TORCH_DIR (the package's
# folder), TORCH_INCLUDE_DIRS, TORCH_LIBRARIES and TORCH_PYTHON_LIBRARY.
#
# Not by find_package(Torch): for a CUDA build of torch it insists on a CUDA toolkit, which nothing here needs.
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
  find_library(TORCH_PYTHON_LIBRARY torch_python PATHS ${KNAPFORMER_TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
  set(KNAPFORMER_TORCH_FOUND ON)
  message(STATUS "knapformer: building against torch in ${KNAPFORMER_TORCH_DIR}")
elseif(KNAPFORMER_TORCH STREQUAL "ON")
  message(FATAL_ERROR "knapformer: KNAPFORMER_TORCH=ON, but ${Python_EXECUTABLE} has no torch. Install it first.")
else()
  message(STATUS "knapformer: no torch found; building the planner only")
endif()
